"""Inference: forward only; a stage hands its microbatch on and keeps nothing of it."""

from meshwright.schedules.base import FORWARD, Rows, Schedule, whole_trip
from meshwright.schedules.interleaved import steps


def _rows(num_stages: int, num_microbatches: int, interleave: int) -> Rows:
    group = num_stages if interleave > 1 else num_microbatches
    return (tuple(steps(FORWARD, group, num_microbatches, range(interleave))),) * num_stages


def _in_flight(num_stages: int, num_microbatches: int, interleave: int) -> tuple[int, ...]:
    return (1,) * num_stages


INFERENCE = Schedule("inference", _rows, _in_flight, whole_trip)
