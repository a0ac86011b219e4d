"""Interleaved 1F1B: each stage holds several chunks of the model, so the pipeline fills sooner.

After Narayanan et al., 2021: microbatches go through in groups of as many as there are stages; a group visits a stage's
first chunk, then its second.
"""

from meshwright.schedules.base import BACKWARD, FORWARD, Rows, Schedule, Step, in_turns, whole_trip


def steps(work: str, num_stages: int, num_microbatches: int, chunks: range) -> list[Step]:
    """One kind of work on every microbatch and chunk, group by group."""
    groups = [range(i, i + num_stages) for i in range(0, num_microbatches, num_stages)]
    return [Step(work, i, chunk) for group in groups for chunk in chunks for i in group]


def _ahead(stage: int, num_stages: int, num_microbatches: int, interleave: int) -> int:
    """Forward steps before the first backward step."""
    ahead = 2 * (num_stages - stage - 1) + (interleave - 1) * num_stages
    return min(num_microbatches * interleave, ahead)


def _rows(num_stages: int, num_microbatches: int, interleave: int) -> Rows:
    forward = steps(FORWARD, num_stages, num_microbatches, range(interleave))
    backward = steps(BACKWARD, num_stages, num_microbatches, range(interleave)[::-1])
    sizes = num_stages, num_microbatches, interleave
    return tuple(in_turns(forward, backward, _ahead(s, *sizes)) for s in range(num_stages))


def _in_flight(num_stages: int, num_microbatches: int, interleave: int) -> tuple[int, ...]:
    most = num_microbatches * interleave
    return tuple(min(most, _ahead(s, num_stages, num_microbatches, interleave) + 1) for s in range(num_stages))


INTERLEAVED = Schedule("interleaved", _rows, _in_flight, whole_trip)
