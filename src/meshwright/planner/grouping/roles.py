"""Finds the role of each argument: parameters, optimizer state or data."""

from dataclasses import dataclass

from meshwright.graph import Graph
from meshwright.graph.phases import BACKWARD, PHASES


@dataclass(frozen=True, slots=True)
class Roles:
    """Value ids of the arguments' leaves by role.

    Attributes:
        parameters: Leaves that the forward pass reads and, in a train step, that come back changed.
        optimizer: Leaves that come back changed and that only the update reads.
        data: All others.
    """

    parameters: tuple[int, ...]
    optimizer: tuple[int, ...]
    data: tuple[int, ...]


def find_roles(graph: Graph) -> Roles:
    """Derives the roles from the graph: arguments that are returned are state; otherwise one argument is parameters.

    If nothing is differentiated, and an argument that is not returned looks like parameters, the returned arguments are
    data: the cache of a decoder.
    """
    state = {graph.inputs[i] for i in graph.state.values()}
    likely = _likely_parameters(graph, state)
    differentiates = bool((graph.columns.phase == PHASES.index(BACKWARD)).any())
    if not state or (likely and not differentiates):
        state = likely
    before = graph.read_before_update
    parameters = tuple(v for v in graph.inputs if v in state and before[v])
    optimizer = tuple(v for v in graph.inputs if v in state and not before[v])
    return Roles(parameters, optimizer, tuple(v for v in graph.inputs if v not in state))


def _likely_parameters(graph: Graph, state: set[int]) -> set[int]:
    """The largest argument whose leaves differ in their first dims, which in a batch all count the examples.

    If there is none, and no argument is returned either, it is the largest argument.
    """
    values: dict[str, list[int]] = {}
    for path, value in zip(graph.input_paths, graph.inputs, strict=True):
        values.setdefault(path.split("/")[0], []).append(value)
    if len(values) < 2:
        return set()
    types = {name: [graph.types[v] for v in leaves] for name, leaves in values.items() if state.isdisjoint(leaves)}
    mixed = [name for name, kinds in types.items() if len({kind.shape[0] for kind in kinds if kind.shape}) > 1]
    likely = mixed or ([] if state else list(types))
    largest = max(likely, key=lambda name: sum(kind.num_bytes for kind in types[name]), default=None)
    return set() if largest is None else set(values[largest])
