"""Which tokens of which requests the next step computes: one scheduler for the engine and for simulations.

Pure Python that knows neither JAX nor a clock. `Limits` says how much there is of everything, `BlockPool` hands out the
blocks of the cache, `Request` is what one request has come to, and `Scheduler` makes the plan of a step.
"""

from meshwright.serving.scheduling.blocks import BlockPool
from meshwright.serving.scheduling.limits import Limits
from meshwright.serving.scheduling.request import Request, Status
from meshwright.serving.scheduling.scheduler import Scheduler, Slice, StepPlan

__all__ = ["BlockPool", "Limits", "Request", "Scheduler", "Slice", "Status", "StepPlan"]
