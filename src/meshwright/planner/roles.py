"""Tells what each argument is for: parameters, optimizer state or data."""

from dataclasses import dataclass

from meshwright.graph import Graph


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
    """Reads the roles off the graph: what comes back is state; else the largest argument is parameters."""
    state = {graph.inputs[i] for i in graph.state.values()}
    if not state:
        state = _largest_argument(graph)
    before = graph.read_before_update
    parameters = tuple(v for v in graph.inputs if v in state and before[v])
    optimizer = tuple(v for v in graph.inputs if v in state and not before[v])
    return Roles(parameters, optimizer, tuple(v for v in graph.inputs if v not in state))


def _largest_argument(graph: Graph) -> set[int]:
    sizes: dict[str, int] = {}
    for path, value in zip(graph.input_paths, graph.inputs, strict=True):
        name = path.split("/")[0]
        sizes[name] = sizes.get(name, 0) + graph.types[value].num_bytes
    if len(sizes) < 2:
        return set()
    largest = max(sizes, key=lambda name: sizes[name])
    return {v for p, v in zip(graph.input_paths, graph.inputs, strict=True) if p.split("/")[0] == largest}
