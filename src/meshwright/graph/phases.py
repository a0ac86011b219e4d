"""Distinguishes forward, backward and update by the name scopes that `jax.grad` leaves on equations."""

from collections.abc import Sequence

import numpy as np

from meshwright.arrays import Ints

PHASES = FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
_NONE, _FORWARD, _BACKWARD, _UPDATE = -1, 0, 1, 2


def assign_phases(scope: Ints, scopes: Sequence[str], makers: Ints, start: Ints) -> Ints:
    """Phase of each operation as its number among `PHASES`.

    An operation with ``transpose(`` in its scope is backward, one with ``jvp(`` forward. Of the others, operations that
    depend on backward ones are update; operations whose results forward or backward ones read, or that read forward
    results, are forward; and the rest are update, unless the program takes no gradient at all.

    Args:
        scope: Number of each operation's scope, in the order they run.
        scopes: The scopes.
        makers: The producers of each operation's operands, one operation after another; -1 for none.
        start: Where each operation's makers begin, and where the last one's end.
    """
    phases = np.array([_named(text) for text in scopes], np.int64)[scope]
    if (phases == _NONE).all():
        return np.full_like(phases, _FORWARD)
    return np.array(_followed(makers.tolist(), start.tolist(), phases.tolist()), np.int64)


def _named(scope: str) -> int:
    if "transpose(" in scope:
        return _BACKWARD
    return _FORWARD if "jvp(" in scope else _NONE


def _followed(makers: list[int], start: list[int], phases: list[int]) -> list[int]:
    """The phases, with those of operations whose scopes name none."""
    for i, phase in enumerate(phases):
        if phase == _NONE:
            latest = max((phases[maker] for maker in makers[start[i] : start[i + 1]] if maker >= 0), default=_NONE)
            if latest != _NONE:
                phases[i] = _FORWARD if latest == _FORWARD else _UPDATE
    feeds = [False] * len(phases)  # is read, directly or not, by forward or backward operations
    for i in range(len(phases) - 1, -1, -1):
        if phases[i] == _NONE:
            phases[i] = _FORWARD if feeds[i] else _UPDATE
        if phases[i] != _UPDATE:
            for maker in makers[start[i] : start[i + 1]]:
                if maker >= 0:
                    feeds[maker] = True
    return phases
