"""A web page about a load that was simulated: distributions of its latencies, and what each replica did over time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from meshwright.output import check_place, write_whole
from meshwright.report.about import today
from meshwright.report.page import assembled, asset
from meshwright.serving.simulation.outcome import Outcome
from meshwright.serving.simulation.replica import Replica

#: Parts of the time that the timeline distinguishes: about as many as a screen shows.
_PARTS = 240
#: Replicas that are drawn.
_DRAWN = 16
#: Points of a distribution.
_POINTS = [*(percent / 100 for percent in range(100)), 0.995, 0.999, 1.0]


@dataclass(frozen=True)
class About:
    """What a page says of what was planned.

    Attributes:
        title: The subject in a few words.
        facts: Figures with their names.
        sentences: What was decided and why.
        columns: Names of the columns of a table of arrangements.
        rows: Its cells.
    """

    title: str
    facts: Mapping[str, str]
    sentences: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_page(path: str | Path, outcome: Outcome, about: About) -> None:
    """Writes one self-contained web page.

    Raises:
        OutputError: The file cannot be written.
    """
    check_place(Path(path))
    plan = {
        "title": about.title,
        "promise": str(outcome.slo),
        "facts": [*about.facts.items(), *_facts(outcome).items()],
        "sentences": list(about.sentences),
        "arrangements": {"columns": list(about.columns), "rows": [list(row) for row in about.rows]},
        "latencies": _latencies(outcome),
        "replicas": [_summary(outcome, replica) for replica in outcome.replicas],
        "timeline": _timeline(outcome),
    }
    data = {"names": ["this plan"], "date": today(), "plans": [plan]}
    own = resources.files("meshwright.serving.simulation").joinpath("assets", "serving.js").read_text(encoding="utf-8")
    scripts = [*(asset(f"{name}.js") for name in ("core", "tables", "axes")), own, asset("main.js")]
    keys = [("1–5", "sections"), ("t", "theme")]
    write_whole(Path(path), assembled(f"{about.title} · Meshwright", data, scripts, keys))


def _facts(outcome: Outcome) -> dict[str, str]:
    said = {
        "kept the promise": f"{outcome.attained:.1%}",
        "requests simulated": f"{len(outcome.requests):,}",
        "tokens of answers a second": f"{outcome.tokens_per_s:,.0f}",
    }
    return said | ({"refused": f"{outcome.refused:,}"} if outcome.refused else {})


def _latencies(outcome: Outcome) -> list[dict[str, Any]]:
    kinds = (
        ("first token", outcome.ttft_s, outcome.slo.ttft_s),
        ("each later token", outcome.tpot_s, outcome.slo.tpot_s),
    )
    found = []
    for name, at, limit in kinds:
        points = [(share, seconds) for share in _POINTS if math.isfinite(seconds := at(share))]
        found.append({"name": name, "limit": limit, "points": points})
    return found


def _summary(outcome: Outcome, replica: Replica) -> dict[str, Any]:
    """A replica in a row of the table."""
    steps, prices = replica.steps, replica.prices
    return {
        "name": _name(replica),
        "split": str(prices.split),
        "busy": replica.busy_s / outcome.duration_s if outcome.duration_s else 0.0,
        "steps": len(steps),
        "step_s": replica.busy_s / len(steps) if steps else 0.0,
        "tokens": sum(step.tokens for step in steps),
        "batch": sum(step.sequences for step in steps) / len(steps) if steps else 0.0,
        "blocks": max((step.blocks for step in steps), default=0) / replica.limits.blocks,
    }


def _name(replica: Replica) -> str:
    purpose = {"both": "", "prefill": ", prompts", "decode": ", answers"}[replica.role]
    return f"{replica.number}{f': {replica.model}' if replica.model else ''}{purpose}"


def _timeline(outcome: Outcome) -> dict[str, Any]:
    """What the first replicas did in equal parts of the time."""
    whole_s = outcome.duration_s
    part_s = whole_s / _PARTS or 1.0
    arrived = [0] * _PARTS
    for request in outcome.requests:
        arrived[min(_PARTS - 1, int(request.arrival_s / part_s))] += 1
    rows = [{"name": "requests that arrive", "lanes": [_lane("a second", [count / part_s for count in arrived])]}]
    rows += [{"name": f"replica {_name(one)}", "lanes": _lanes(one, part_s)} for one in outcome.replicas[:_DRAWN]]
    return {"seconds": whole_s, "rows": rows, "left": max(0, len(outcome.replicas) - _DRAWN)}


def _lanes(replica: Replica, part_s: float) -> list[dict[str, Any]]:
    """How busy a replica was in each part of the time, and the most that ran, waited and was in its cache."""
    busy, running, waiting, used = ([0.0] * _PARTS for _ in range(4))
    for step in replica.steps:
        end_s = step.start_s + step.seconds
        for part in range(min(_PARTS - 1, int(step.start_s / part_s)), min(_PARTS - 1, int(end_s / part_s)) + 1):
            busy[part] += max(0.0, min(end_s, (part + 1) * part_s) - max(step.start_s, part * part_s)) / part_s
            running[part] = max(running[part], step.sequences)
            waiting[part] = max(waiting[part], step.waiting)
            used[part] = max(used[part], step.blocks / replica.limits.blocks)
    limits = (1.0, replica.limits.slots, None, 1.0)
    names = ("busy", "running", "waiting", "cache")
    return [_lane(*lane) for lane in zip(names, (busy, running, waiting, used), limits, strict=True)]


def _lane(name: str, values: Sequence[float], limit: float | None = None) -> dict[str, Any]:
    return {"name": name, "limit": limit, "values": [round(value, 4) for value in values]}
