"""How far a planned step may be from a measured one, by what its time is made of: `plan.trust`.

For each kind of work `trust.toml` has a spread: how far, as a factor, the price of that kind was from measured steps of
programs that were not used to set prices. Errors within a kind go the same way in a program, and those of different
kinds do not depend on each other, so that the spread of a step is √(Σ (share · spread)²).
"""

import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import exp, sqrt
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from meshwright.console import Printed
from meshwright.cost.attention import generation
from meshwright.cost.load import Load
from meshwright.cost.rates import cluster_rates
from meshwright.cost.xla_gpu.kernels import ESTIMATED_RATES, MEASURED_ALONE, UNMEASURED
from meshwright.plans.loops import PlannedLoop, extremes, loop_remarks, loops_of
from meshwright.rules.families.gathering import SCATTERS
from meshwright.units import format_seconds

if TYPE_CHECKING:
    from meshwright.plans.plan import PlanData

COMMUNICATION, UNPRICED = "communication", "priced without measurement"
_LOOK_UPS = frozenset(("gather", "sort", "top_k", *SCATTERS, *(name.replace("-", "_") for name in SCATTERS)))


@dataclass(frozen=True)
class Trust(Printed):
    """How far a planned step may be from a measured one.

    Attributes:
        step_s: The planned step.
        low_s, high_s: Nine of ten measured steps lie between these.
        shares: The parts of the step by kind of work, the largest first.
        unmeasured: The operations that are priced without measurement, with their parts of the step, the largest first.
        loops: Its `while` loops, and how often each is assumed to run.
    """

    step_s: float
    low_s: float
    high_s: float
    shares: dict[str, float]
    unmeasured: dict[str, float]
    loops: tuple[PlannedLoop, ...] = ()

    def __rich__(self) -> RenderableType:
        lines = [f"{format_seconds(self.step_s)}, {self.interval}: nine of ten measured steps lie between these"]
        lines += [f"  {share:5.0%} {kind}" for kind, share in self.shares.items() if share >= 0.005]
        return Text("\n".join([*lines, *self.remarks]))

    @property
    def interval(self) -> str:
        """Such as ``195–240 ms``; ``195 ms or more`` where nothing tells how often loops run."""
        if self.high_s == float("inf"):
            return f"{format_seconds(self.low_s)} or more"
        low, high = format_seconds(self.low_s), format_seconds(self.high_s)
        (first, unit), (_, last) = low.split(), high.split()
        return f"{first}–{high}" if unit == last else f"{low}–{high}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Says how often loops were assumed to run, and which operations are priced without measurement.

        The latter are said where they are more than a twentieth of the step.
        """
        found, total = loop_remarks(self.loops), sum(self.unmeasured.values())
        if total >= 0.05:
            found.append(f"{total:.0%} of the step is priced without measurement: {', '.join(self.unmeasured)}.")
        return tuple(found)


def trust_of(plan: "PlanData") -> Trust | None:
    """How far a plan's step may be off; None where nothing is known: on an abstract mesh, on CPUs and for stages."""
    chip, cluster = plan.mesh.chip, plan.mesh.cluster
    if chip is None or cluster is None or plan.mesh.is_cpu or plan.stages or not plan.step_s:
        return None
    rates = cluster_rates(cluster)
    by_kind: dict[str, float] = defaultdict(float)
    unmeasured: dict[str, float] = defaultdict(float)
    times: list[tuple[int, float]] = []
    for op in plan.ops:
        if op.load is not None:
            name, seconds = op.label.rsplit("/", 1)[-1], op.load.trips * rates.load_s(op.load)
            kind = kind_of(name, op.load)
            by_kind[kind] += seconds
            times.append((op.serial, seconds))
            if kind == UNPRICED:
                unmeasured[name] += seconds
    total = sum(by_kind.values())
    step_s, cost = plan.step_s, plan.cost
    sent_s = cost.waiting if cost.step else cost.communication  # what compute does not hide, where that is known
    part = (1 - sent_s / step_s) / total if total else 0.0
    shares = {kind: seconds * part for kind, seconds in _largest(by_kind)}
    shares |= {COMMUNICATION: sent_s / step_s} if sent_s else {}
    if "profile" in plan.provenance:  # its time was measured
        bound = exp(_data()["width"] * _data()["measured"])
    else:
        bound = bound_of(shares, is_other=generation(chip) != _data()["generation"])
    told = {name: seconds * part for name, seconds in _largest(unmeasured)}
    loops = loops_of(plan)
    least, most = (1.0, 1.0) if "profile" in plan.provenance else extremes(loops, times)
    return Trust(step_s, step_s * least / bound, step_s * most * bound, shares, told, loops)


def bound_of(shares: Mapping[str, float], is_other: bool = False) -> float:
    """The factor by which a step may be longer or shorter than planned, by the parts of it that are of each kind.

    Args:
        shares: The parts by kind of work.
        is_other: Whether the chip is none of those whose kernels were measured.
    """
    data = _data()
    spread = sum((share * data["kinds"][kind]) ** 2 for kind, share in shares.items()) + data["rest"] ** 2
    return exp(data["width"] * sqrt(spread + (data["other_chips"] ** 2 if is_other else 0.0)))


def _largest(parts: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda part: -part[1])


def kind_of(name: str, load: Load) -> str:
    """The kind of work of an operation, by its primitive and its load."""
    if name in UNMEASURED or (name == "conv_general_dilated" and load.aligned in ESTIMATED_RATES):
        return UNPRICED
    if load.attention:
        return "attention"
    if name == "conv_general_dilated":
        return "convolutions"
    if load.flops:
        return "products" if load.dtype in ("bfloat16", "float16") else "products of float32"
    if name in _LOOK_UPS:
        return "look-ups, scatters and sorts"
    if name in MEASURED_ALONE:
        return "transforms, running sums and decompositions"
    return "loops" if load.trips >= _MANY else "kernels that move bytes"


_MANY = 64  # trips from which a loop's kernels are small, and their start is what counts


def spreads_of_kinds() -> dict[str, float]:
    """The spread of each kind of work, and of the rest of every step as the last."""
    return {**_data()["kinds"], "rest": _data()["rest"]}


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    return tomllib.loads(files("meshwright.plans").joinpath("trust.toml").read_text(encoding="utf-8"))
