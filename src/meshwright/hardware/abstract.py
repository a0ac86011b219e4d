"""Prices collectives of an abstract mesh: one fixed cost and one cost per byte on every axis."""

from meshwright.hardware.collectives import Way

#: Size, α and β of one axis.
Axis = tuple[int, float, float]


def abstract_ways(kind: str, axes: list[Axis]) -> tuple[Way, ...]:
    """The cost of a collective along axes in sequence, as its single way.

    >>> abstract_ways("all_gather", [(4, 1.0, 1.0)])
    ((1.0, 0.75),)
    """
    alpha = beta = 0.0
    gathered = 1.0  # share of the buffer that an axis works on: what the later axes have not yet multiplied
    for size, axis_alpha, axis_beta in reversed(axes):
        share = gathered if kind in ("all_gather", "reduce_scatter") else 1.0
        alpha += axis_alpha
        beta += axis_beta * _wire_share(kind, size) * share
        gathered /= size
    return ((alpha, beta),)


def _wire_share(kind: str, size: int) -> float:
    """Part of the buffer that one device sends along an axis."""
    if kind == "permute":
        return 1.0
    if kind == "all_to_all":
        return (size - 1) / size**2
    return (2 if kind == "all_reduce" else 1) * (size - 1) / size
