"""An exploration for people: a table, and speed against price as a picture, of characters or as an SVG file."""

import math
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Table
from meshwright.errors import ClusterError
from meshwright.exploration.offer import Offer
from meshwright.units import format_bytes, format_seconds

_WIDTH, _HEIGHT = 60, 14
_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SVG_SIZE = (720, 420)
_SVG_MARGIN = 60
_STARRED, _PLAIN = "#c2410c", "#64748b"


def exploration_view(offers: Sequence[Offer], pareto: Sequence[Offer], objective: str) -> RenderableType:
    """Table, picture, and where prices come from."""
    parts: list[RenderableType] = [_table(offers, pareto, objective)]
    if any(offer.tokens_per_dollar is not None for offer in offers):
        parts += [Text(), Text(picture(offers, pareto))]
    sources = dict.fromkeys(o.price_source for o in offers if o.price_source)
    if sources:
        parts += [Text(), Text("prices: " + "; ".join(sources))]
    problems = [f"{offer.cluster.name}: {offer.problem}" for offer in offers if offer.problem]
    if problems:
        parts += [Text(), Text("\n".join(problems))]
    return Group(*parts)


def _table(offers: Sequence[Offer], pareto: Sequence[Offer], objective: str) -> Table:
    table = Table(title=f"clusters by {objective}; ★ no other is both faster and cheaper", title_justify="left")
    for name in ("", "cluster", "mesh", "step", "tokens/s", "of peak", "memory", "$/h", "tokens/$", "★"):
        table.add_column(name, justify="left" if name in ("", "cluster", "mesh", "★") else "right")
    front = {id(offer) for offer in pareto}
    for number, offer in enumerate(offers):
        table.add_row(_mark(number), *_cells(offer), "★" if id(offer) in front else "")
    return table


def _cells(offer: Offer) -> list[str]:
    dollars = "unknown" if offer.dollars_per_hour is None else f"{offer.dollars_per_hour:,.2f}"
    if offer.plan is None or offer.simulation is None:
        return [offer.cluster.name, "no plan", "", "", "", "", dollars, ""]
    simulated = offer.simulation
    shape = "×".join(str(size) for size in offer.plan.mesh.sizes)
    if offer.plan.stages:
        count = len(offer.plan.stages)
        shape = f"{count} stage{'s' * (count > 1)}"
    per_dollar = "" if offer.tokens_per_dollar is None else f"{offer.tokens_per_dollar:,.0f}"
    rates = [f"{simulated.tokens_per_s:,.0f}", f"{simulated.mfu:.1%}", format_bytes(simulated.peak_bytes)]
    return [offer.cluster.name, shape, format_seconds(simulated.step_s), *rates, dollars, per_dollar]


def _mark(number: int) -> str:
    return _MARKS[number] if number < len(_MARKS) else "·"


def picture(offers: Sequence[Offer], pareto: Sequence[Offer]) -> str:
    """Speed to the right, tokens for a dollar upwards, both logarithmic."""
    front = {id(offer) for offer in pareto}
    points = [
        (math.log10(o.tokens_per_s), math.log10(o.tokens_per_dollar), number, id(o) in front)
        for number, o in enumerate(offers)
        if o.tokens_per_s and o.tokens_per_dollar
    ]
    left, right = min(p[0] for p in points), max(p[0] for p in points)
    low, high = min(p[1] for p in points), max(p[1] for p in points)
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for x, y, number, starred in points:
        column = round((x - left) / ((right - left) or 1) * (_WIDTH - 2))
        line = _HEIGHT - 1 - round((y - low) / ((high - low) or 1) * (_HEIGHT - 1))
        grid[line][column] = _mark(number)
        grid[line][column + 1] = "★" if starred else grid[line][column + 1]
    lines = [f"{'tokens/$':>12} ┤{''.join(grid[0])}".rstrip()]
    lines += [f"{'':12} │{''.join(row)}".rstrip() for row in grid[1:]]
    axis = f"{'':12} └{'─' * _WIDTH}"
    scale = f"{10**low:,.0f} to {10**high:,.0f} tokens/$ · {10**left:,.0f} to {10**right:,.0f} tokens/s →"
    return "\n".join([*lines, axis, f"{'':14}{scale}"])


def save_picture(offers: Sequence[Offer], pareto: Sequence[Offer], path: Path) -> None:
    """Writes the SVG file: one point a cluster, the Pareto front joined.

    Raises:
        ClusterError: No cluster has both a plan and a price.
    """
    points = [o for o in offers if o.tokens_per_s and o.tokens_per_dollar]
    if not points:
        raise ClusterError(
            "there is nothing to draw: no cluster has both a plan and a price; give prices={chip: dollars}"
        )
    place = _Scale([_logs(offer) for offer in points])
    root = ElementTree.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_SVG_SIZE[0]} {_SVG_SIZE[1]}",
        attrib={"font-family": "sans-serif", "font-size": "12"},
    )
    _axes(root)
    front = [place(offer) for offer in pareto]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in front)
    ElementTree.SubElement(root, "polyline", points=joined, fill="none", stroke=_STARRED)
    starred = {id(offer) for offer in pareto}
    for offer in points:
        x, y = place(offer)
        colour = _STARRED if id(offer) in starred else _PLAIN
        ElementTree.SubElement(root, "circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="5", fill=colour)
        _text(root, x + 8, y - 6, f"{offer.cluster.name}: {offer.tokens_per_s:,.0f} tokens/s", colour)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _logs(offer: Offer) -> tuple[float, float]:
    assert offer.tokens_per_s and offer.tokens_per_dollar
    return math.log(offer.tokens_per_s), math.log(offer.tokens_per_dollar)


class _Scale:
    """From a cluster's figures to a place in the picture, both axes logarithmic."""

    def __init__(self, values: list[tuple[float, float]]):
        self.low = [min(value[i] for value in values) for i in (0, 1)]
        self.span = [(max(value[i] for value in values) - self.low[i]) or 1.0 for i in (0, 1)]

    def __call__(self, offer: Offer) -> tuple[float, float]:
        x, y = ((value - low) / span for value, low, span in zip(_logs(offer), self.low, self.span, strict=True))
        width, height = _SVG_SIZE[0] - 4 * _SVG_MARGIN, _SVG_SIZE[1] - 2 * _SVG_MARGIN
        return _SVG_MARGIN + x * width, _SVG_SIZE[1] - _SVG_MARGIN - y * height


def _axes(root: ElementTree.Element) -> None:
    bottom, right = _SVG_SIZE[1] - _SVG_MARGIN / 2, _SVG_SIZE[0] - _SVG_MARGIN / 2
    line = {"stroke": _PLAIN, "stroke-width": "1"}
    left = str(_SVG_MARGIN / 2)
    ElementTree.SubElement(root, "line", x1=left, x2=str(right), y1=str(bottom), y2=str(bottom), attrib=line)
    ElementTree.SubElement(root, "line", x1=left, x2=left, y1=left, y2=str(bottom), attrib=line)
    _text(root, right - 100, bottom + 18, "tokens/s →", _PLAIN)
    _text(root, _SVG_MARGIN / 2, _SVG_MARGIN / 2 - 8, "tokens/$ ↑", _PLAIN)


def _text(root: ElementTree.Element, x: float, y: float, words: str, colour: str) -> None:
    label = ElementTree.SubElement(root, "text", x=f"{x:.1f}", y=f"{y:.1f}", fill=colour)
    label.text = words
