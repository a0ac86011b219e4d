"""Schedules: in which order the stages of a pipeline work on the microbatches; one file each."""

from meshwright.errors import ShardingError
from meshwright.schedules.base import Rows, Schedule, Step
from meshwright.schedules.gpipe import GPIPE
from meshwright.schedules.inference import INFERENCE
from meshwright.schedules.interleaved import INTERLEAVED
from meshwright.schedules.one_f_one_b import ONE_F_ONE_B
from meshwright.schedules.zero_bubble import ZB_H1

__all__ = ["SCHEDULES", "Rows", "Schedule", "Step", "find_schedule", "in_flight", "table"]

SCHEDULES = {s.name: s for s in (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, INFERENCE)}


def table(name: str, num_stages: int, num_microbatches: int, interleave: int = 1) -> Rows:
    """The steps of each stage, one row a stage, in order.

    Args:
        name: ``gpipe``, ``1f1b``, ``interleaved``, ``zb-h1`` or ``inference``; ``1f1b`` with several chunks a stage is
            ``interleaved``.
        num_stages: Number of stages.
        num_microbatches: Number of microbatches.
        interleave: Chunks of the model on each stage; chunk ``c`` of stage ``s`` is the ``c · num_stages + s``-th.

    >>> [f"{step.work[0]}{step.microbatch}" for step in table("1f1b", 2, 3)[0]]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    schedule = find_schedule(name, num_stages, num_microbatches, interleave)
    return schedule.rows(num_stages, num_microbatches, interleave)


def in_flight(name: str, num_stages: int, num_microbatches: int, interleave: int = 1) -> tuple[int, ...]:
    """For each stage, the most microbatches (times chunks) whose activations it holds at once; as `table`."""
    schedule = find_schedule(name, num_stages, num_microbatches, interleave)
    return schedule.in_flight(num_stages, num_microbatches, interleave)


def find_schedule(name: str, num_stages: int, num_microbatches: int, interleave: int) -> Schedule:
    """The schedule of a name, if it can order that much work.

    Raises:
        ShardingError: There is no such schedule, or it cannot.
    """
    if name not in SCHEDULES:
        raise ShardingError(f"unknown schedule {name!r}: choose one of {', '.join(SCHEDULES)}")
    sizes = {"stages": num_stages, "microbatches": num_microbatches, "interleave": interleave}
    for word, number in sizes.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ShardingError(f"a pipeline's {word} must be a whole number of at least 1, not {number!r}")
    if name in (ONE_F_ONE_B.name, INTERLEAVED.name):
        name = INTERLEAVED.name if interleave > 1 else ONE_F_ONE_B.name
    if interleave > 1 and name not in (INTERLEAVED.name, INFERENCE.name):
        raise ShardingError(
            f"schedule {name!r} has no interleaved form, but interleave is {interleave}: use '1f1b', or interleave=1"
        )
    if interleave > 1 and num_microbatches % num_stages:
        raise ShardingError(
            f"interleaved stages take microbatches in groups of {num_stages}, one a stage, and {num_microbatches} is "
            "no multiple of it: change the microbatch or the number of stages, or use interleave=1"
        )
    return SCHEDULES[name]
