"""Turns readings into the figures of a chip and its links.

    launch    the time of a product of 8 × 8 matrices                                     launch_s
    products  seconds = start + FLOPs / rate, over two sizes of each type                 flops, half_flops
    memory    seconds = bytes / rate, over two sizes                                      memory_bandwidth
    special   seconds = memory + functions · special_s                                    special_s
    window    seconds = product + fetches · fetch_s, over two convolutions                fetch_s
    collective seconds = α + β · bytes, over two or three sizes of each kind and group    timings

All are least squares of relative errors, so that small and large amounts count alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from meshwright.hardware.chip import Chip, Figure
from meshwright.hardware.collectives import KINDS
from meshwright.hardware.link import Timing
from meshwright.profiler.survey import Reading, Survey

LEAST_ALPHA_S = 1e-7
LEAST_BETA_S = 1e-14  # 100 TB/s
_HALVES = ("float16", "float8", "float4", "int8")  # types that are not measured, but change with bfloat16


def fit_line(amounts: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fixed time and time per amount, neither below 0, by least squares of relative errors.

    >>> [round(number, 6) for number in fit_line([0, 10, 20], [1.0, 2.0, 3.0])]
    [1.0, 0.1]
    """
    x, t = np.asarray(amounts, dtype=float), np.asarray(seconds, dtype=float)
    if len(set(amounts)) > 1:
        weighted = np.stack([1 / t, x / t], axis=1)
        (fixed, slope), *_ = np.linalg.lstsq(weighted, np.ones(len(t)), rcond=None)
        if fixed >= 0 and slope >= 0:
            return float(fixed), float(slope)
        if slope < 0:
            return float((1 / t).sum() / (1 / t**2).sum()), 0.0
    return 0.0, fit_slope(amounts, seconds)


def fit_slope(amounts: Sequence[float], seconds: Sequence[float]) -> float:
    """Time per amount where nothing takes no time, by least squares of relative errors."""
    speeds = np.asarray(amounts, dtype=float) / np.asarray(seconds, dtype=float)
    return float(speeds.sum() / (speeds**2).sum())


def timings(survey: Survey, across: bool) -> tuple[Timing, ...]:
    """α and β of every kind in every size of group that was measured, inside processes or across them.

    A kind that was not measured in time is priced like the all-reduce of its group, which does at least as much work: a
    price from the catalogue would seem too cheap beside measured ones.
    """
    readings_of: dict[tuple[str, int], list[Reading]] = {}
    for reading in survey.readings:
        if reading.size > 1 and reading.across == across:
            readings_of.setdefault((reading.what, reading.size), []).append(reading)
    timing_of = {key: _timing(*key, readings) for key, readings in readings_of.items() if len(readings) > 1}
    sizes = sorted({size for kind, size in timing_of if kind == "all_reduce"}, reverse=True)
    return tuple(
        timing_of.get((kind, size)) or _like(timing_of["all_reduce", size], kind) for size in sizes for kind in KINDS
    )


def _like(all_reduce: Timing, kind: str) -> Timing:
    share = all_reduce.size if kind == "all_to_all" else 1  # its bytes are those of the whole group
    return replace(all_reduce, kind=kind, beta_s=all_reduce.beta_s / share)


def _timing(kind: str, size: int, readings: Sequence[Reading]) -> Timing:
    alpha, beta = fit_line([r.amount for r in readings], [r.seconds for r in readings])
    return Timing(kind, size, max(alpha, LEAST_ALPHA_S), max(beta, LEAST_BETA_S))


def fitted_chip(chip: Chip, survey: Survey) -> Chip:
    """The chip with measured figures in place of the catalogue's.

    Rates of types that were not measured are the catalogue's, scaled as those of the type that they resemble.
    """
    launch_s = _quickest(survey.readings, "launch", chip.launch_s)
    rates, ramps = _rates(survey.readings)
    flops = _scaled(chip, rates)
    changes: dict[str, float] = {"launch_s": launch_s} if _of(survey.readings, "launch") else {}
    memory = _of(survey.readings, "memory")
    if memory:
        slope = fit_slope([r.amount for r in memory], [r.seconds for r in memory])
        bandwidth = 1 / max(slope, LEAST_BETA_S)
        changes |= {"memory_bandwidth": bandwidth, "memory_efficiency": _efficiency(chip, bandwidth)}
        changes["special_s"] = _special_s(replace(chip, **changes), survey.readings)  # type: ignore[arg-type]
    if rates:
        sixteen = replace(chip, flops=flops).peak_flops("float16")
        changes |= {"best_fraction": 1.0, "half_flops": float(np.mean(ramps)) * sixteen}
        changes["vector_flops"] = chip.vector_flops * _factor(chip, rates, "float32")
        changes["fetch_s"] = _fetch_s(replace(chip, flops=flops, **changes), survey.readings)  # type: ignore[arg-type]
    if survey.memory_bytes:
        changes["memory_bytes"] = survey.memory_bytes
    measured = {f"flops.{dtype}": rate for dtype, rate in rates.items()} | changes
    figures = (*_figures(measured, survey), *(f for f in chip.figures if f.name not in measured))
    return replace(chip, flops=flops, figures=figures, **changes)  # type: ignore[arg-type]


def _rates(readings: Iterable[Reading]) -> tuple[dict[str, float], list[float]]:
    """FLOP/s by type, and the time that products of each type take to start and to come up to speed."""
    rates, ramps = {}, []
    by_type: dict[str, list[Reading]] = {}
    for reading in _of(readings, "matmul"):
        by_type.setdefault(reading.dtype, []).append(reading)
    for dtype, of_dtype in by_type.items():
        fixed, slope = fit_line([r.amount for r in of_dtype], [r.seconds for r in of_dtype])
        largest = max(of_dtype, key=lambda r: r.amount)
        rates[dtype] = 1 / slope if slope > 0 else largest.amount / largest.seconds
        ramps.append(max(fixed, 0.0))
    return rates, ramps


def _efficiency(chip: Chip, bandwidth: float) -> float:
    """The fraction of a stream's rate that the kernels of whole steps reach.

    A stream is the best case. Where the catalogue has the fraction that kernels reach in profiles, that is the upper
    limit.
    """
    profiled = any(f.name == "memory_efficiency" and f.sure == "measured" for f in chip.figures)
    return min(1.0, chip.memory_bandwidth * chip.memory_efficiency / bandwidth) if profiled else 1.0


def _special_s(chip: Chip, readings: Iterable[Reading]) -> float:
    """Time of a division, root or the like, of which a probe takes two for each number that it reads and writes."""
    special = _of(readings, "special")
    left = [(r.seconds - chip.memory_s(4.0 * r.amount)) / r.amount for r in special]
    return max(min(left), 0.0) if left else chip.special_s


def _fetch_s(chip: Chip, readings: Iterable[Reading]) -> float:
    """Time of a fetch under a convolution's window: its time minus that of the product.

    On CPUs it is some tens of nanoseconds, whatever the window and the number of features; 0 where products hide it.
    """
    windows = _of(readings, "window")
    if not windows:
        return chip.fetch_s
    seconds = np.array([r.seconds for r in windows])
    products = np.array([chip.matmul_s(r.flops, r.dtype) for r in windows])
    speeds = np.array([r.amount for r in windows]) / seconds  # least squares of errors relative to the whole time
    return max(float((speeds * (1 - products / seconds)).sum() / (speeds**2).sum()), 0.0)


def _scaled(chip: Chip, rates: dict[str, float]) -> tuple[tuple[str, float], ...]:
    dtypes = dict.fromkeys([*(dtype for dtype, _ in chip.flops), *rates])
    return tuple((dtype, rates.get(dtype) or chip.peak_flops(dtype) * _factor(chip, rates, dtype)) for dtype in dtypes)


def _factor(chip: Chip, rates: dict[str, float], dtype: str) -> float:
    """By how much the measured rate of the type that a type resembles differs from the catalogue's."""
    like = "bfloat16" if dtype in _HALVES and "bfloat16" in rates else "float32"
    return rates[like] / chip.peak_flops(like) if like in rates else 1.0


def _of(readings: Iterable[Reading], what: str) -> list[Reading]:
    return [reading for reading in readings if reading.what == what]


def _quickest(readings: Iterable[Reading], what: str, otherwise: float) -> float:
    return min((reading.seconds for reading in _of(readings, what)), default=otherwise)


def _figures(measured: dict[str, float], survey: Survey) -> tuple[Figure, ...]:
    where = f"measured on {survey.machine.host} with all {survey.machine.num_devices} devices at work"
    return tuple(
        Figure(name, value, where, survey.date, "assumed" if name == "vector_flops" else "measured")
        for name, value in measured.items()
    )
