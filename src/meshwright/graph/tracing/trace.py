"""Traces a JAX function to a Graph: flattened, without unneeded operations, with phases and state identified."""

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from meshwright.graph.graph import Columns, Graph
from meshwright.graph.phases import FORWARD, PHASES
from meshwright.graph.tracing.call import Call, Leaves, call_abstractly
from meshwright.graph.tracing.flatten import Flat, Names
from meshwright.graph.tracing.garbage import collector_paused
from meshwright.hardware import Cluster

_MOST_GIVEN = 2**24  # integers of an argument of which a copy is kept; 64 MB


@dataclass(frozen=True)
class Traced:
    """A function, its flat graph, and the call it was made from, with the structure of arguments and results.

    Attributes:
        cluster: The cluster that it was traced for; None for the devices at hand.
        given: For arguments of integers that were given as arrays, by their number, a copy: a rehearsal looks up what
            the user's batch looks up.
        written: The graph of the step as the user wrote it, where recomputation or microbatches changed it.
    """

    graph: Graph
    call: Call
    function: Callable[..., Any]
    cluster: Cluster | None = None
    given: Mapping[int, NDArray[np.integer]] = field(default_factory=dict, compare=False, repr=False)
    written: Graph | None = field(default=None, compare=False, repr=False)


def trace(function: Callable[..., Any], *args: Any, cluster: Cluster | None = None) -> Traced:
    """Traces ``function(*args)``; arguments are pytrees of arrays or `jax.ShapeDtypeStruct`.

    Leaves that are not arrays are passed unchanged, and so are numbers that the function's Python code reads. Code that
    asks for devices finds those of the cluster, if one is given (see `planned_devices`).

    Raises:
        TraceError: JAX could not trace the function; the message carries JAX's own reason in one paragraph.
    """
    with collector_paused():
        call = call_abstractly(function, args, cluster)
        integers = _integers(call.arguments.pick(args))
        traced = of_call(call, function, cluster, integers)
        state = {*traced.graph.state.values()}
        return replace(traced, given={n: array for n, array in integers.items() if n not in state})


def of_call(
    call: Call,
    function: Callable[..., Any],
    cluster: Cluster | None,
    given: Mapping[int, NDArray[np.integer]] | None = None,
    seen: Mapping[int, float] | None = None,
) -> Traced:
    """A function that is traced already, with its flat graph.

    Args:
        call: The call.
        function: The function.
        cluster: The cluster that it was traced for.
        given: Arguments of integers that were given as arrays, by number.
        seen: How often `while` loops ran in the program before a pass changed it, by their ids, where that followed
            from the given arguments.
    """
    flat = Flat(call.program, Names(), given, seen)
    flat.look_into_tables()
    return Traced(_graph(flat, call.arguments, call.results), call, function, cluster)


def _integers(arrays: Sequence[Any]) -> dict[int, NDArray[np.integer]]:
    """Copies of the arrays of integers that this process has whole; very large ones are left."""
    found = {}
    for number, array in enumerate(arrays):
        is_whole = isinstance(array, jax.Array) and array.is_fully_addressable
        if not is_whole and not isinstance(array, np.ndarray | np.generic):
            continue
        if isinstance(array, jax.core.Tracer) or array.size > _MOST_GIVEN:
            continue
        if jnp.issubdtype(array.dtype, np.integer):
            found[number] = np.array(array)
    return found


def returning(traced: Traced, donated: Collection[int]) -> Traced:
    """The traced function if these leaves, by number, are donated: even a single array then has a next value."""
    graph, call = traced.graph, traced.call
    kinds, changing = graph.kind.tolist(), _changing(graph.columns, len(graph.inputs), {*graph.donated, *donated})
    inputs, outputs = ([kinds[v] for v in values] for values in (graph.inputs, graph.outputs))
    state = _next_values(call.arguments, call.results, inputs, outputs, changing)
    found = _without_examples(graph, state, call.arguments.owners, donated)
    return replace(traced, graph=replace(graph, state=found))


def _changing(columns: Columns, num_inputs: int, donated: set[int]) -> set[int]:
    """Arguments whose next value is a result of their type; in a forward pass equal types are mere coincidence."""
    return set(range(num_inputs)) if columns.phase.any() else donated


def _graph(flat: Flat, arguments: Leaves, results: Leaves) -> Graph:
    columns = _columns(flat)
    keep = _needed(columns, flat)
    columns = columns.only(keep)
    made = columns.producer >= 0
    made[: flat.num_inputs] = True
    before = np.concatenate([[0], np.cumsum(keep)]).tolist()  # kept operations before each
    inputs = range(flat.num_inputs)

    def kept(loops: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((before[a], before[b]) for a, b in loops if before[a] < before[b])

    changing = _changing(columns, len(inputs), set(flat.donated))
    graph = Graph(
        kinds=tuple(flat.names.kinds),
        kind=np.array(flat.kind, np.int64),
        columns=columns,
        inputs=tuple(inputs),
        input_paths=arguments.paths,
        outputs=tuple(flat.outputs),
        output_paths=results.paths,
        constants=frozenset(np.flatnonzero(~made).tolist()),
        donated=frozenset(flat.donated),
        ties=tuple(t for t in flat.ties if made[t.made] and made[t.carry]),
        loops=kept(flat.loops),
        whiles=tuple(w._replace(start=a, stop=b) for w in flat.whiles for a, b in kept([(w.start, w.stop)])),
        branches=kept(flat.branches),
        state=_next_values(arguments, results, flat.kind, [flat.kind[v] for v in flat.outputs], changing),
    )
    return replace(graph, state=_without_examples(graph, graph.state, arguments.owners, flat.donated))


def _columns(flat: Flat) -> Columns:
    names, signature = flat.names, np.array(flat.signature, np.int64)
    num_reads = np.array([len(s.operands) for s in names.signatures], np.int64)[signature]
    return Columns(
        signature=signature,
        reads=np.array(flat.reads, np.int64),
        start=np.concatenate([[0], np.cumsum(num_reads)]),
        first_made=np.array(flat.first_made, np.int64),
        scope=np.array(flat.scope, np.int64),
        trips=np.array(flat.trips, np.float64),
        serial=np.array(flat.id, np.int64),
        equation=flat.equation,
        num_values=len(flat.kind),
        signatures=tuple(names.signatures),
        scopes=tuple(names.scopes),
    )


def _needed(columns: Columns, flat: Flat) -> NDArray[np.bool_]:
    """For each operation, whether the outputs depend on it, through loop carries too."""
    operations = _operands_and_results(columns)
    used, keep = bytearray(columns.num_values), np.zeros(len(operations), bool)
    waiting = flat.outputs
    while waiting:
        for value in waiting:
            used[value] = True
        for i in range(len(operations) - 1, -1, -1):
            operands, first, last = operations[i]
            if any(used[first:last]):
                keep[i] = True
                for value in operands:
                    used[value] = True
        waiting = [t.made for t in flat.ties if used[t.carry] and not used[t.made]]
    return keep


def _operands_and_results(columns: Columns) -> list[tuple[list[int], int, int]]:
    """The operands of each operation, its first result and the value after its last one.

    Lists are as quick as a kernel for what is gone over once, and a run that takes its plan from a file needs no numba.
    """
    reads, bounds = columns.reads.tolist(), pairwise(columns.start.tolist())
    results = zip(columns.first_made.tolist(), (columns.first_made + columns.num_made).tolist(), strict=True)
    return [(reads[start:stop], *made) for (start, stop), made in zip(bounds, results, strict=True)]


def _next_values(
    arguments: Leaves, results: Leaves, in_kinds: Sequence[int], out_kinds: Sequence[int], changing: Container[int]
) -> dict[int, int]:
    """Pairs each result with the argument whose next value it is.

    A result is an argument's next value when the whole argument comes back: some subtree of the results has the
    argument's paths and types, leaf for leaf. An argument that is one array must be among those `changing`.
    """
    groups: dict[str, list[int]] = {}
    for i, owner in enumerate(arguments.owners):
        groups.setdefault(owner, []).append(i)
    by_path = {path: i for i, path in enumerate(results.paths)}
    prefixes = _prefixes(results.paths)
    pairs: dict[int, int] = {}
    for name, members in groups.items():
        if arguments.paths[members[0]] == name and members[0] not in changing:
            continue
        endings = [arguments.paths[i][len(name) :] for i in members]
        for prefix in prefixes:
            if prefix + endings[0] not in by_path:
                continue
            found = [by_path.get(prefix + ending, -1) for ending in endings]
            next_of = dict(zip(found, members, strict=True))
            if all(o >= 0 and o not in pairs and out_kinds[o] == in_kinds[i] for o, i in next_of.items()):
                pairs |= next_of
                break
    return pairs


def _without_examples(
    graph: Graph, state: Mapping[int, int], owners: Sequence[str], donated: Collection[int]
) -> Mapping[int, int]:
    """The next values without those that only look so: of a batch, a result of its types, such as a reconstruction.

    The forward pass computes them, from what is trained and from an argument whose leaves are stacks of as many
    examples as those of an argument that does not come back, if there is any.
    """
    columns, forward = graph.columns, PHASES.index(FORWARD)
    makers = {out: int(columns.producer[graph.outputs[out]]) for out in state}
    updated = {leaf for out, leaf in state.items() if makers[out] >= 0 and columns.phase[makers[out]] != forward}
    early = {out: leaf for out, leaf in state.items() if makers[out] >= 0 and leaf not in updated | {*donated}}
    if not (updated and early):
        return state
    used = _reached(graph, updated)
    back = {owners[leaf] for leaf in state.values()}
    rows = _first_dims(graph, (i for i, owner in enumerate(owners) if owner not in back))
    found: set[int] = set()
    for owner in {owners[leaf] for leaf in early.values()}:
        own = [i for i, name in enumerate(owners) if name == owner]
        results = [out for out, leaf in state.items() if leaf in own]
        sizes = _first_dims(graph, own)
        if all(out in early for out in results) and any(used[graph.outputs[out]] for out in results):
            found.update(results if len(sizes) == 1 and (sizes <= rows or not rows) else ())
    return {out: leaf for out, leaf in state.items() if out not in found}


def _first_dims(graph: Graph, leaves: Iterable[int]) -> set[int]:
    return {shape[0] for i in leaves if (shape := graph.types[graph.inputs[i]].shape)}


def _reached(graph: Graph, leaves: Iterable[int]) -> bytearray:
    """For each value, whether it depends on some leaves, through loop carries too."""
    operations = _operands_and_results(graph.columns)
    used = bytearray(graph.columns.num_values)
    waiting = [graph.inputs[i] for i in leaves]
    while waiting:
        for value in waiting:
            used[value] = True
        for operands, first, last in operations:
            if any(used[value] for value in operands):
                used[first:last] = b"\1" * (last - first)
        waiting = [t.carry for t in graph.ties if used[t.made] and not used[t.carry]]
    return used


def _prefixes(paths: Sequence[str]) -> list[str]:
    """Every path and the paths above it, outermost first."""
    found: dict[str, None] = {}
    for path in paths:
        new = []
        while path and path not in found:
            new.append(path)
            path = path.rpartition("/")[0]
        found |= dict.fromkeys(reversed(new))
    return list(found)
