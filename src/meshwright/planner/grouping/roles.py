"""Finds the role of each argument: parameters, optimizer state or data."""

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.graph import Graph
from meshwright.graph.phases import BACKWARD, PHASES


@dataclass(frozen=True, slots=True)
class Roles:
    """Value ids of the arguments' leaves by role.

    Attributes:
        parameters: Leaves that the forward pass reads and, in a train step, that come back changed; and frozen ones.
        optimizer: Leaves that come back changed and that only the update reads.
        data: All others.
    """

    parameters: tuple[int, ...]
    optimizer: tuple[int, ...]
    data: tuple[int, ...]


def find_roles(graph: Graph) -> Roles:
    """Derives the roles from the graph: arguments that are returned are state; otherwise one argument is parameters.

    If nothing is differentiated, and an argument that is not returned looks like parameters, the returned arguments are
    data: the cache of a decoder. Of a train step, arguments that look like parameters are frozen ones, such as the
    model beside which adapters are trained, or a reference model.
    """
    state = {graph.inputs[i] for i in graph.state.values()}
    likely = _likely_parameters(graph, state)
    differentiates = bool((graph.columns.phase == PHASES.index(BACKWARD)).any())
    if not state or (likely and not differentiates):
        state = likely
    elif differentiates:
        state |= _frozen(graph, state)
    before = graph.read_before_update
    parameters = tuple(v for v in graph.inputs if v in state and before[v])
    optimizer = tuple(v for v in graph.inputs if v in state and not before[v])
    return Roles(parameters, optimizer, tuple(v for v in graph.inputs if v not in state))


def _frozen(graph: Graph, state: set[int]) -> set[int]:
    """Leaves of arguments of floats that differ in their first dims, of which none counts the examples of the others.

    Parts of an argument are looked at as well: a batch may hold a model, and all arguments but the state may be one
    tuple, ``*batch``.
    """

    def is_model(leaves: list[int]) -> bool:
        are_floats = all(graph.types[v].dtype.startswith(("float", "bfloat")) for v in leaves)
        return are_floats and len(_first_dims(graph, leaves)) > 1

    for depth in (1, 2):
        given = [leaves for leaves in _arguments(graph, depth).values() if state.isdisjoint(leaves)]
        rows = _first_dims(graph, (v for leaves in given if not is_model(leaves) for v in leaves))
        models = [leaves for leaves in given if is_model(leaves) and rows.isdisjoint(_first_dims(graph, leaves))]
        if rows and models:
            return {v for leaves in models for v in leaves}
    return set()


def _first_dims(graph: Graph, values: Iterable[int]) -> set[int]:
    return {graph.types[v].shape[0] for v in values if graph.types[v].shape}


def _arguments(graph: Graph, depth: int = 1) -> dict[str, list[int]]:
    """The leaves of each argument, by its name; or, with more depth, of its parts."""
    found: dict[str, list[int]] = {}
    for path, value in zip(graph.input_paths, graph.inputs, strict=True):
        found.setdefault("/".join(path.split("/")[:depth]), []).append(value)
    return found


def _likely_parameters(graph: Graph, state: set[int]) -> set[int]:
    """The largest argument whose leaves differ in their first dims, which in a batch all count the examples.

    If there is none, and no argument is returned either, it is the largest argument.
    """
    values = _arguments(graph)
    if len(values) < 2:
        return set()
    types = {name: [graph.types[v] for v in leaves] for name, leaves in values.items() if state.isdisjoint(leaves)}
    mixed = [name for name, kinds in types.items() if len({kind.shape[0] for kind in kinds if kind.shape}) > 1]
    likely = mixed or ([] if state else list(types))
    largest = max(likely, key=lambda name: sum(kind.num_bytes for kind in types[name]), default=None)
    return set() if largest is None else set(values[largest])
