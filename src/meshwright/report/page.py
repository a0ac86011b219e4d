"""Writes the page: the assets and the plan's data put into one file that needs no network."""

import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.explain.sentence import plain_sentence
from meshwright.output import write_whole
from meshwright.report.data import difference_data, page_data

if TYPE_CHECKING:
    from meshwright.planner.plan import Plan

_SCRIPTS = ("core", "picture", "tables", "overview", "difference", "tensors", "graph", "charts", "stages", "main")
_SECONDS = 1.6  # for all that the page shows, what else was possible among it


def write_report(plan: "Plan", path: Path, other: "Plan | None" = None) -> None:
    """See `Plan.report`.

    Raises:
        OutputError: The file cannot be written.
    """
    write_whole(path, page(plan, other))


def page(plan: "Plan", other: "Plan | None" = None, seconds: float = _SECONDS) -> str:
    """The whole page as text."""
    plans = [plan] if other is None else [plan, other]
    data: dict[str, Any] = {
        "names": ["this plan"] if other is None else _names(plan, other),
        "plans": [page_data(p, seconds / len(plans)) for p in plans],
    }
    if other is not None:
        data["difference"] = difference_data(plan, other)
    # Inside a script HTML knows "</script", "<script" and "<!--": none is left where no "<" is.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    parts = {
        "title": html.escape(f"{plain_sentence(plan)} · Meshwright"),
        "style": _asset("style.css"),
        "script": "\n".join(_asset(f"{name}.js") for name in _SCRIPTS),
        "data": text,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _asset("page.html"))


def notebook_html(plan: "Plan") -> str:
    """The page in a frame of its own, as a notebook shows it; alternatives are left to `Plan.explain`."""
    frame = html.escape(page(plan, seconds=0.0), quote=True)
    return f'<iframe srcdoc="{frame}" style="width:100%;height:720px;border:0" title="Meshwright plan"></iframe>'


def _names(one: "Plan", other: "Plan") -> list[str]:
    """Short names of two plans: their methods where these differ, else their meshes."""
    if one.method != other.method:
        return [one.method, other.method]
    meshes = ["×".join(map(str, plan.mesh.sizes)) for plan in (one, other)]
    return meshes if meshes[0] != meshes[1] else ["one", "other"]


def _asset(name: str) -> str:
    return resources.files("meshwright.report").joinpath("assets", name).read_text(encoding="utf-8")
