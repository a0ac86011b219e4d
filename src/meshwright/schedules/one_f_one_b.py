"""1F1B: a stage starts the backward pass of a microbatch as soon as it can (PipeDream-flush, Narayanan et al.)."""

from meshwright.schedules.base import BACKWARD, FORWARD, Rows, Schedule, Step, in_turns, whole_trip


def _rows(num_stages: int, num_microbatches: int, interleave: int) -> Rows:
    forward = [Step(FORWARD, i) for i in range(num_microbatches)]
    backward = [Step(BACKWARD, i) for i in range(num_microbatches)]
    return tuple(in_turns(forward, backward, min(num_microbatches, num_stages - s - 1)) for s in range(num_stages))


def _in_flight(num_stages: int, num_microbatches: int, interleave: int) -> tuple[int, ...]:
    return tuple(min(num_microbatches, num_stages - s) for s in range(num_stages))


ONE_F_ONE_B = Schedule("1f1b", _rows, _in_flight, whole_trip)
