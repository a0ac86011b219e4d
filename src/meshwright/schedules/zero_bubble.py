"""ZB-H1: weights' gradients wait, to fill the time in which 1F1B would (Qi et al., *Zero Bubble*, 2023).

Stage ``s`` puts off the weights' gradients of ``s`` microbatches: every stage holds what the first one holds in 1F1B.
"""

from meshwright.schedules.base import BACKWARD, FORWARD, WEIGHTS, Rows, Schedule, Step


def _row(stage: int, num_stages: int, num_microbatches: int) -> tuple[Step, ...]:
    ahead = min(num_microbatches, num_stages - stage - 1)
    row = [Step(FORWARD, i) for i in range(ahead)]
    for i in range(num_microbatches):
        if i + ahead < num_microbatches:
            row.append(Step(FORWARD, i + ahead))
        row.append(Step(BACKWARD, i))
        if i >= stage:
            row.append(Step(WEIGHTS, i - stage))
    left = range(max(0, num_microbatches - stage), num_microbatches)
    return (*row, *(Step(WEIGHTS, i) for i in left))


def _rows(num_stages: int, num_microbatches: int, interleave: int) -> Rows:
    return tuple(_row(s, num_stages, num_microbatches) for s in range(num_stages))


def _in_flight(num_stages: int, num_microbatches: int, interleave: int) -> tuple[int, ...]:
    return (min(num_microbatches, num_stages),) * num_stages


def _fill(forward_s: float, backward_s: float, weights_s: float, interleave: int) -> float:
    """The others wait for the inputs' gradients alone, and have weights' gradients of their own to do meanwhile.

    It holds where weights' gradients take no longer than the forward pass and than the inputs' gradients.
    """
    return forward_s + backward_s - 2 * weights_s


ZB_H1 = Schedule("zb-h1", _rows, _in_flight, _fill, full_from=2)
