"""How much of a simulated step's communication runs beside compute."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from meshwright.plans.plan import PlanData
from meshwright.simulator.lanes import Span, Timeline
from meshwright.simulator.simulate import simulate
from meshwright.simulator.work import COMPUTE


def hidden_bytes(plan: PlanData) -> Mapping[tuple[str, tuple[str, ...]], float]:
    """Bytes that a plan of one program on a cluster sends beside compute, by kind of collective and mesh axes."""
    sizes = defaultdict[tuple[str, tuple[str, ...]], float](float)
    (stage,) = simulate(plan).stages
    for timeline in (*(one.run for one in stage.passes), stage.update):
        for span, share in hidden_shares(timeline):
            sizes[span.task.collective] += span.task.num_bytes * share
    return sizes


def hidden_shares(timeline: Timeline) -> list[tuple[Span, float]]:
    """For each task that is not compute, the part of its time in which the device computes as well."""
    computing = [(span.start_s, span.end_s) for span in timeline.spans if span.task.kind == COMPUTE]
    sending = [span for span in timeline.spans if span.task.kind != COMPUTE and span.end_s > span.start_s]
    if not computing or not sending:
        return [(span, 0.0) for span in sending]
    borders = np.sort(np.array(computing).ravel())  # one lane computes: its spans do not overlap
    busy = np.concatenate([[0.0], np.cumsum(np.diff(borders) * (np.arange(len(borders) - 1) % 2 == 0))])
    begin, end = (np.interp([getattr(span, at) for span in sending], borders, busy) for at in ("start_s", "end_s"))
    return [(span, float(b - a) / (span.end_s - span.start_s)) for span, a, b in zip(sending, begin, end, strict=True)]
