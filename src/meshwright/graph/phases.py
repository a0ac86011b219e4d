"""Tells forward, backward and update apart by the name scopes that `jax.grad` leaves on equations."""

from collections.abc import Sequence
from typing import Any

from meshwright.graph.graph import BACKWARD, FORWARD, UPDATE


def assign_phases(ops: Sequence[tuple[Any, ...]]) -> list[str]:
    """Phase of each operation, given as ``(signature, inputs, outputs, scope, …)`` in the order they run.

    ``transpose(`` in the scope is backward and ``jvp(`` forward. Of the rest, what depends on backward is update; what
    feeds forward or backward work, or reads forward results, is forward; and what is left is update, unless the
    program takes no gradient at all.
    """
    phases: list[str | None] = [_named(op[3]) for op in ops]
    if not any(phases):
        return [FORWARD] * len(ops)
    after: dict[int, str] = {}  # value → the latest phase it depends on
    for i, (_, ins, outs, *_rest) in enumerate(ops):
        if phases[i] is None:
            seen = {after.get(v) for v in ins}
            if seen & {BACKWARD, UPDATE}:
                phases[i] = UPDATE
            elif FORWARD in seen:
                phases[i] = FORWARD
        phase = phases[i]
        if phase is not None:
            after.update(dict.fromkeys(outs, phase))
    feeds: set[int] = set()  # values read, at any distance, by forward or backward work
    for i in range(len(ops) - 1, -1, -1):
        _, ins, outs, *_rest = ops[i]
        if phases[i] is None:
            phases[i] = FORWARD if any(v in feeds for v in outs) else UPDATE
        if phases[i] != UPDATE:
            feeds.update(ins)
    return [phase or UPDATE for phase in phases]


def _named(scope: str) -> str | None:
    if "transpose(" in scope:
        return BACKWARD
    return FORWARD if "jvp(" in scope else None
