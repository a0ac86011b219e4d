"""What a simulated load met with: latencies as distributions, how busy the replicas were, and when."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Printed, Table
from meshwright.serving.planning.promise import Slo
from meshwright.serving.simulation.replica import Replica

#: The points of a distribution that are printed.
POINTS = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Served:
    """One request and what it met with.

    Attributes:
        arrival_s: When it came.
        ttft_s: From then to its first token; infinite where it was refused.
        tpot_s: For each later token, in the mean; 0 where there was none.
        tokens_in: Tokens of its prompt.
        tokens_out: Tokens of its answer.
    """

    arrival_s: float
    ttft_s: float
    tpot_s: float
    tokens_in: int
    tokens_out: int

    @property
    def end_s(self) -> float:
        """When its last token came."""
        return self.arrival_s + self.ttft_s + self.tpot_s * (self.tokens_out - 1)


@dataclass(frozen=True)
class Outcome(Printed):
    """A load that was simulated; print it.

    Attributes:
        requests: The requests, in the order in which they came.
        replicas: The replicas with all their steps.
        slo: The promise.
    """

    requests: tuple[Served, ...]
    replicas: tuple[Replica, ...]
    slo: Slo

    @property
    def attained(self) -> float:
        """Share of the requests that kept the promise."""
        return sum(self.slo.kept_by(r.ttft_s, r.tpot_s) for r in self.requests) / len(self.requests)

    @property
    def keeps_promise(self) -> bool:
        """Whether as many requests kept it as were promised."""
        return self.attained >= self.slo.percentile

    @property
    def duration_s(self) -> float:
        """From the beginning to the last token."""
        return max((r.end_s for r in self.requests if math.isfinite(r.ttft_s)), default=0.0)

    @property
    def refused(self) -> int:
        """Requests that found the queue full."""
        return sum(math.isinf(r.ttft_s) for r in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers a second."""
        produced = sum(r.tokens_out for r in self.requests if math.isfinite(r.ttft_s))
        return produced / self.duration_s if self.duration_s else 0.0

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Part of the time in which each replica was at a step."""
        return tuple(r.busy_s / self.duration_s if self.duration_s else 0.0 for r in self.replicas)

    def ttft_s(self, share: float) -> float:
        """The time to the first token that a share of the requests did not exceed."""
        return _at([r.ttft_s for r in self.requests], share)

    def tpot_s(self, share: float) -> float:
        """The time for each later token that a share of the requests did not exceed."""
        return _at([r.tpot_s for r in self.requests if r.tokens_out > 1], share)

    def mean(self, name: str) -> float:
        """The mean of ``"ttft_s"`` or ``"tpot_s"`` over requests that were served."""
        served = [getattr(r, name) for r in self.requests if math.isfinite(r.ttft_s)]
        return sum(served) / len(served) if served else math.inf

    def to_json(self) -> dict[str, Any]:
        """Plain data: the distributions, and for each replica what it was at over time."""
        return {
            "num_requests": len(self.requests),
            "refused": self.refused,
            "attained": self.attained,
            "tokens_per_s": self.tokens_per_s,
            "ttft_s": {f"p{point * 100:g}": _finite(self.ttft_s(point)) for point in POINTS},
            "tpot_s": {f"p{point * 100:g}": _finite(self.tpot_s(point)) for point in POINTS},
            "utilisation": list(self.utilisation),
        }

    def save_timeline(self, path: str | Path) -> None:
        """Writes what each replica did as a trace for Perfetto (https://ui.perfetto.dev): steps, queue, cache."""
        events: list[dict[str, Any]] = []
        for replica in self.replicas:
            name = {"name": f"replica {replica.number} ({replica.role})"}
            events.append({"ph": "M", "name": "process_name", "pid": replica.number, "args": name})
            for step in replica.steps:
                at = {"pid": replica.number, "tid": 0, "ts": step.start_s * 1e6}
                work = {"tokens": step.tokens, "sequences": step.sequences, "cached": step.cached}
                events.append({"ph": "X", "name": "step", "dur": step.seconds * 1e6, "args": work, **at})
                counts = {"sequences": step.sequences, "waiting": step.waiting}
                events.append({"ph": "C", "name": "requests", "args": counts, **at})
                events.append({"ph": "C", "name": "blocks of the cache", "args": {"used": step.blocks}, **at})
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")

    def __rich__(self) -> RenderableType:
        title = f"{len(self.requests)} requests simulated; {self.attained:.1%} kept the promise ({self.slo})"
        table = Table(title=title, title_justify="left")
        for name in ("", *(f"p{point * 100:g}" for point in POINTS)):
            table.add_column(name, justify="right" if name else "left")
        for name, at in (("first token", self.ttft_s), ("each later token", self.tpot_s)):
            table.add_row(name, *(f"{at(point) * 1e3:,.1f} ms" for point in POINTS))
        busy = " · ".join(f"{u:.0%}" for u in self.utilisation[:8]) + (" …" if len(self.utilisation) > 8 else "")
        said = f"{self.tokens_per_s:,.0f} tokens/s, replicas busy {busy}"
        return Group(table, Text(said + (f", {self.refused} refused" if self.refused else "")))


def _at(values: list[float], share: float) -> float:
    """The smallest value that a share of the values does not exceed."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
