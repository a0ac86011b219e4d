"""An exploration for people: a table, and speed against price as a picture of characters."""

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Table
from meshwright.exploration.offer import Offer
from meshwright.units import format_bytes, format_seconds

_WIDTH, _HEIGHT = 60, 14
_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


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
