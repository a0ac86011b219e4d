"""The catalogues as tables and as JSON: the zoo's models and the chips."""

from dataclasses import asdict
from typing import Any

from meshwright import zoo
from meshwright.console import Table, bare_table
from meshwright.hardware import Chip, chips, find_chip
from meshwright.hardware.storage import to_plain
from meshwright.units import format_bytes

_SOURCE_WIDTH = 25


def model_rows() -> list[dict[str, Any]]:
    """Every model of the zoo as plain data."""
    return [asdict(zoo.entry(name)) for name in zoo.names()]


def model_table(rows: list[dict[str, Any]]) -> Table:
    """The models for people."""
    counts = "parameters", "layers"
    table = bare_table("name", "family", *counts, "batch", "seq", "shape", right=counts)
    for row in rows:
        shape = dict(row["shape"])
        layers = shape.pop("layers", shape.pop("stages", ""))
        table.add_row(
            row["name"],
            row["family"],
            _count(row["num_params"]),
            _plain(layers),
            str(row["batch"]),
            str(row["seq"] or "-"),
            " ".join(f"{key}={_plain(value)}" for key, value in shape.items()),
        )
    return table


def chip_rows() -> list[dict[str, Any]]:
    """Every chip as plain data, with the source of each figure."""
    return [_chip_row(chip) for chip in chips()]


def chip_row(name: str) -> dict[str, Any]:
    """One chip as plain data."""
    return _chip_row(find_chip(name))


def _chip_row(chip: Chip) -> dict[str, Any]:
    return to_plain(chip) | {"figures": [asdict(figure) for figure in chip.figures]}


def chip_table() -> Table:
    """The chips for people; rates are dense peaks, and links are given by the rate at which one device sends."""
    rates = ("GB/s", "16-bit TFLOP/s", "32-bit")
    links = ("in a host, GB/s", "between hosts")
    table = bare_table("name", "memory", *rates, *links, "peaks from", right=("memory", *rates))
    table.caption = "The source of every figure: meshwright chips NAME"
    table.caption_justify = "left"
    for chip in chips():
        table.add_row(
            chip.name,
            format_bytes(chip.memory_bytes),
            _number(chip.memory_bandwidth / 1e9),
            _number(max(chip.peak_flops("bfloat16"), chip.peak_flops("float16")) / 1e12),
            _number(chip.peak_flops("float32") / 1e12),
            f"{chip.intra.kind} {_number(chip.intra.bandwidth / 1e9)}",
            f"{chip.inter.kind} {_number(chip.inter.bandwidth / 1e9)}",
            _peak_source(chip),
        )
    return table


def figure_table(name: str) -> Table:
    """Every figure of one chip with where it came from."""
    chip = find_chip(name)
    table = bare_table("figure", "value", "sure", "date", "source", right=("value",))
    table.title = f"{chip.name} ({chip.vendor}); also called {', '.join(chip.aliases) or 'nothing else'}"
    table.title_justify = "left"
    for figure in chip.figures:
        table.add_row(figure.name, f"{figure.value:.6g}", figure.sure, figure.date, figure.source)
    return table


def _peak_source(chip: Chip) -> str:
    figures = {figure.name: figure for figure in chip.figures}
    figure = figures.get("flops.bfloat16") or figures.get("flops.float16") or figures.get("flops.float32")
    source = "" if figure is None else figure.source
    return source if len(source) <= _SOURCE_WIDTH else source[: _SOURCE_WIDTH - 1] + "…"


def _number(value: float) -> str:
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _count(number: int | None) -> str:
    if number is None:
        return "-"
    return f"{number / 1e9:.4g} B" if number >= 1e9 else f"{number / 1e6:.4g} M"


def _plain(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
