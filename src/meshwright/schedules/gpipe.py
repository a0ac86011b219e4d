"""GPipe: every microbatch forward, then every microbatch backward (Huang et al., 2019)."""

from meshwright.schedules.base import BACKWARD, FORWARD, Rows, Schedule, Step, whole_trip


def _rows(num_stages: int, num_microbatches: int, interleave: int) -> Rows:
    row = tuple(Step(work, i) for work in (FORWARD, BACKWARD) for i in range(num_microbatches))
    return (row,) * num_stages


def _in_flight(num_stages: int, num_microbatches: int, interleave: int) -> tuple[int, ...]:
    return (num_microbatches,) * num_stages


GPIPE = Schedule("gpipe", _rows, _in_flight, whole_trip)
