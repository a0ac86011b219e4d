"""The definition of a schedule: for each stage a table of its work, in order, with its costs and its memory."""

from collections.abc import Callable
from dataclasses import dataclass

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of a stage's table.

    Attributes:
        work: ``forward``, ``backward``, or ``weights`` where a schedule does the weights' gradients apart: then
            ``backward`` is that of the inputs alone.
        microbatch: Which microbatch.
        chunk: Which of the stage's model chunks; 0 where stages are not interleaved.
    """

    work: str
    microbatch: int
    chunk: int = 0


Rows = tuple[tuple[Step, ...], ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to order the microbatches' work.

    With ``m`` microbatches a stage is busy for ``m`` times its own time; a schedule decides how long it waits until the
    pipeline is full and empty again, to which every other stage adds its `fill`.

    Attributes:
        name: Its name in `mw.ThreeD`.
        rows: ``(num_stages, num_microbatches, interleave)`` to the table, one row a stage.
        in_flight: The same to the most microbatches (times chunks) whose activations each stage holds at once.
        fill: ``(forward_s, backward_s, weights_s, interleave)`` of one microbatch on a stage, ``weights_s`` being part
            of ``backward_s``, to the seconds by which that stage delays all the others.
        full_from: Microbatches for each stage from which `fill` holds; with fewer a stage delays the others by all its
            time.
    """

    name: str
    rows: Callable[[int, int, int], Rows]
    in_flight: Callable[[int, int, int], tuple[int, ...]]
    fill: Callable[[float, float, float, int], float]
    full_from: int = 0


def in_turns(first: list[Step], second: list[Step], ahead: int) -> tuple[Step, ...]:
    """Two lists of steps one by one in turns, the first being some steps ahead of the second."""
    steps = first[:ahead]
    for one, other in zip(first[ahead:], second, strict=False):
        steps += [one, other]
    return (*steps, *second[len(first) - ahead :])


def whole_trip(forward_s: float, backward_s: float, weights_s: float, interleave: int) -> float:
    """The `fill` of schedules that wait for a microbatch's whole way through the other stages."""
    return (forward_s + backward_s) / interleave
