"""Writes the page: the assets and the plan's data put into one file that needs no network."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import ShardingError
from meshwright.output import check_place, write_whole
from meshwright.report.about import plan_names, title, today
from meshwright.report.data import difference_data, page_data

if TYPE_CHECKING:
    from meshwright.plans.plan import PlanData
    from meshwright.runtime.stages.recording import Event

_SCRIPTS = (
    *("core", "picture", "tables", "axes", "overview", "difference", "stages", "timeline", "instructions", "memory"),
    *("tensors", "layout", "graph", "communication", "blocks", "main"),
)


def write_report(
    plan: "PlanData", path: Path, other: "PlanData | None", seconds: float, recorded: "Sequence[Event]" = ()
) -> None:
    """See `Plan.report`.

    Raises:
        ShardingError: The seconds are not a valid time, or the step that was recorded is not one of the plan's.
        OutputError: The file cannot be written.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise ShardingError(f"seconds is {seconds!r}; give the time for the page, 0 or more")
    if any(event.stage >= len(plan.stages) for event in recorded):
        stages = f"{len(plan.stages)} stages" if plan.stages else "no stages"
        raise ShardingError(f"recorded has events of other stages than the plan's, which has {stages}; give its own")
    check_place(path)
    write_whole(path, page(plan, other, seconds, recorded))


def page(plan: "PlanData", other: "PlanData | None", seconds: float, recorded: "Sequence[Event]" = ()) -> str:
    """The whole page as text."""
    plans = [plan] if other is None else [plan, other]
    data: dict[str, Any] = {
        "names": ["this plan"] if other is None else plan_names(plan, other),
        "date": today(),
        "plans": [page_data(p, seconds / len(plans), () if p is other else recorded) for p in plans],
    }
    if other is not None:
        data["difference"] = difference_data(plan, other)
    keys = [("/", "search"), ("1–8", "sections"), ("↑↓", "tensors"), ("t", "theme")]
    return assembled(f"{title(plan, other)} · Meshwright", data, [asset(f"{name}.js") for name in _SCRIPTS], keys)


def assembled(heading: str, data: Mapping[str, Any], scripts: Sequence[str], keys: Sequence[tuple[str, str]]) -> str:
    """A page of scripts that draw data, in the frame and the style that all pages share."""
    # Inside a script HTML knows "</script", "<script" and "<!--": none is left where no "<" is.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    parts = {
        "title": html.escape(heading),
        "style": asset("style.css"),
        "script": "\n".join(scripts),
        "data": text,
        "keys": " · ".join(f"<kbd>{key}</kbd> {does}" for key, does in keys),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], asset("page.html"))


def notebook_html(plan: "PlanData") -> str:
    """The page in a frame of its own, as a notebook shows it; alternatives are left to `Plan.explain`."""
    frame = html.escape(page(plan, None, 0.0), quote=True)
    return f'<iframe srcdoc="{frame}" style="width:100%;height:720px;border:0" title="Meshwright plan"></iframe>'


def asset(name: str) -> str:
    """A file of the page."""
    return resources.files("meshwright.report").joinpath("assets", name).read_text(encoding="utf-8")
