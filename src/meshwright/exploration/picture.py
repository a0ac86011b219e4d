"""Draws an exploration as an SVG file: one point a cluster, the Pareto front joined."""

import math
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from meshwright.errors import ClusterError
from meshwright.exploration.offer import Offer

_SIZE = (720, 420)
_MARGIN = 60
_STARRED, _PLAIN = "#c2410c", "#64748b"


def save_picture(offers: Sequence[Offer], pareto: Sequence[Offer], path: Path) -> None:
    """Writes the picture.

    Raises:
        ClusterError: No cluster has both a plan and a price.
    """
    points = [o for o in offers if o.tokens_per_s and o.tokens_per_dollar]
    if not points:
        raise ClusterError(
            "there is nothing to draw: no cluster has both a plan and a price; give prices={chip: dollars}"
        )
    place = _scale(points)
    root = ElementTree.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_SIZE[0]} {_SIZE[1]}",
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


def _scale(points: list[Offer]) -> "_Scale":
    return _Scale([_logs(offer) for offer in points])


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
        width, height = _SIZE[0] - 4 * _MARGIN, _SIZE[1] - 2 * _MARGIN
        return _MARGIN + x * width, _SIZE[1] - _MARGIN - y * height


def _axes(root: ElementTree.Element) -> None:
    bottom, right = _SIZE[1] - _MARGIN / 2, _SIZE[0] - _MARGIN / 2
    line = {"stroke": _PLAIN, "stroke-width": "1"}
    left = str(_MARGIN / 2)
    ElementTree.SubElement(root, "line", x1=left, x2=str(right), y1=str(bottom), y2=str(bottom), attrib=line)
    ElementTree.SubElement(root, "line", x1=left, x2=left, y1=left, y2=str(bottom), attrib=line)
    _text(root, right - 100, bottom + 18, "tokens/s →", _PLAIN)
    _text(root, _MARGIN / 2, _MARGIN / 2 - 8, "tokens/$ ↑", _PLAIN)


def _text(root: ElementTree.Element, x: float, y: float, words: str, colour: str) -> None:
    label = ElementTree.SubElement(root, "text", x=f"{x:.1f}", y=f"{y:.1f}", fill=colour)
    label.text = words
