"""The gap between a cost and its lower bound, defined once; needs nothing, so that plans can be shown without NumPy."""

import math


def relative_gap(cost: float, bound: float) -> float:
    """The gap, as it is defined everywhere: by which part of its lower bound a cost is above it.

    It is inf while either is unknown, and where something costs more than a bound of 0.

    >>> relative_gap(3.0, 2.0), relative_gap(0.0, 0.0), relative_gap(1.0, 0.0)
    (0.5, 0.0, inf)
    """
    if not math.isfinite(cost) or not math.isfinite(bound):
        return float("inf")
    if cost <= bound:
        return 0.0
    return float((cost - bound) / abs(bound)) if bound else float("inf")
