"""Traces a JAX function to a Graph: flattened, without unneeded operations, with phases and state identified."""

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.graph.graph import Columns, Graph
from meshwright.graph.tracing.call import Call, Leaves, call_abstractly
from meshwright.graph.tracing.flatten import Names, Program
from meshwright.graph.tracing.garbage import collector_paused
from meshwright.hardware import Cluster
from meshwright.jit import kernel


@dataclass(frozen=True)
class Traced:
    """A function, its flat graph, and the call it was made from, with the structure of arguments and results.

    Attributes:
        cluster: The cluster that it was traced for; None for the devices at hand.
    """

    graph: Graph
    call: Call
    function: Callable[..., Any]
    cluster: Cluster | None = None


def trace(function: Callable[..., Any], *args: Any, cluster: Cluster | None = None) -> Traced:
    """Traces ``function(*args)``; arguments are pytrees of arrays or `jax.ShapeDtypeStruct`.

    Leaves that are not arrays are passed unchanged, and so are numbers that the function's Python code reads. Code that
    asks for devices finds those of the cluster, if one is given (see `planned_devices`).

    Raises:
        TraceError: JAX could not trace the function; the message carries JAX's own reason in one paragraph.
    """
    with collector_paused():
        call = call_abstractly(function, args, cluster)
        program = Program(call.jaxpr, Names())
        program.look_into_tables()
        return Traced(_graph(program, call.arguments, call.results), call, function, cluster)


def returning(traced: Traced, donated: Collection[int]) -> Traced:
    """The traced function if these leaves, by number, are donated: even a single array then has a next value."""
    graph, call = traced.graph, traced.call
    kinds, changing = graph.kind.tolist(), _changing(graph.columns, len(graph.inputs), {*graph.donated, *donated})
    inputs, outputs = ([kinds[v] for v in values] for values in (graph.inputs, graph.outputs))
    state = _next_values(call.arguments, call.results, inputs, outputs, changing)
    return replace(traced, graph=replace(graph, state=state))


def _changing(columns: Columns, num_inputs: int, donated: set[int]) -> set[int]:
    """Arguments whose next value is a result of their type; in a forward pass equal types are mere coincidence."""
    return set(range(num_inputs)) if columns.phase.any() else donated


def _graph(program: Program, arguments: Leaves, results: Leaves) -> Graph:
    columns = _columns(program)
    keep = _needed(columns, program)
    columns = columns.only(keep)
    made = columns.producer >= 0
    made[: program.num_inputs] = True
    before = np.concatenate([[0], np.cumsum(keep)]).tolist()  # kept operations before each
    inputs = range(program.num_inputs)

    def kept(loops: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((before[a], before[b]) for a, b in loops if before[a] < before[b])

    changing = _changing(columns, len(inputs), set(program.donated))
    return Graph(
        kinds=tuple(program.names.kinds),
        kind=np.array(program.kind, np.int64),
        columns=columns,
        inputs=tuple(inputs),
        input_paths=arguments.paths,
        outputs=tuple(program.outputs),
        output_paths=results.paths,
        constants=frozenset(np.flatnonzero(~made).tolist()),
        donated=frozenset(program.donated),
        ties=tuple(t for t in program.ties if made[t.made] and made[t.carry]),
        loops=kept(program.loops),
        whiles=kept(program.whiles),
        branches=kept(program.branches),
        state=_next_values(arguments, results, program.kind, [program.kind[v] for v in program.outputs], changing),
    )


def _columns(program: Program) -> Columns:
    names, signature = program.names, np.array(program.signature, np.int64)
    num_reads = np.array([len(s.operands) for s in names.signatures], np.int64)[signature]
    return Columns(
        signature=signature,
        reads=np.array(program.reads, np.int64),
        start=np.concatenate([[0], np.cumsum(num_reads)]),
        first_made=np.array(program.first_made, np.int64),
        scope=np.array(program.scope, np.int64),
        trips=np.array(program.trips, np.float64),
        serial=np.arange(len(signature)),
        equation=program.equation,
        num_values=len(program.kind),
        signatures=tuple(names.signatures),
        scopes=tuple(names.scopes),
    )


def _needed(columns: Columns, program: Program) -> NDArray[np.bool_]:
    """For each operation, whether the outputs depend on it, through loop carries too."""
    used, keep = np.zeros(columns.num_values, bool), np.zeros(len(columns.signature), bool)
    waiting = program.outputs
    while waiting:
        used[waiting] = True
        _mark(columns.reads, columns.start, columns.first_made, columns.num_made, used, keep)
        waiting = [t.made for t in program.ties if used[t.carry] and not used[t.made]]
    return keep


@kernel
def _mark(reads, start, first_made, num_made, used, keep):
    """Keeps the operations that compute used values; the values they read are used in turn."""
    for i in range(len(keep) - 1, -1, -1):
        if used[first_made[i] : first_made[i] + num_made[i]].any():
            keep[i] = True
            used[reads[start[i] : start[i + 1]]] = True


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
