"""Fits: figures that made the readings come back from them."""

import pytest

from meshwright.hardware import find_chip
from meshwright.hardware.collectives import KINDS
from meshwright.profiler.fit import LEAST_ALPHA_S, LEAST_BETA_S, fit_line, fitted_chip, timings
from meshwright.profiler.survey import Reading

from .surveys import ALPHA_S, BETA_S, collectives, compute, survey

CPU = find_chip("cpu")


def test_a_line_comes_back():
    assert fit_line([1, 10, 100], [2.5, 7.0, 52.0]) == pytest.approx((2.0, 0.5))


def test_small_amounts_count_as_much_as_large_ones():
    fixed, slope = fit_line([1, 1000, 1e6], [1.0, 1.2, 201.0])
    assert fixed == pytest.approx(1.0, rel=0.02) and slope == pytest.approx(2e-4, rel=0.02)


def test_neither_part_of_a_line_is_negative():
    assert fit_line([1, 10], [1.0, 20.0]) == (0.0, pytest.approx(1.2))
    assert fit_line([1, 10], [3.0, 2.0]) == (pytest.approx(2.31, rel=0.01), 0.0)
    assert fit_line([5], [10.0]) == (0.0, 2.0)


def test_timings_are_those_of_the_machine():
    found = timings(survey(), across=False)
    assert {(t.kind, t.size) for t in found} == {(k, n) for k in KINDS for n in (2, 8)}
    assert all((t.alpha_s, t.beta_s) == (pytest.approx(ALPHA_S), pytest.approx(BETA_S)) for t in found)
    assert timings(survey(), across=True) == ()


def test_noise_gives_no_free_collective():
    readings = [Reading(kind, amount, 1e-9, size=8) for kind in KINDS for amount in (1e3, 1e6)]
    for timing in timings(survey(readings), across=False):
        assert timing.alpha_s >= LEAST_ALPHA_S and timing.beta_s >= LEAST_BETA_S


def test_a_kind_that_found_no_time_costs_what_an_all_reduce_does():
    found = {t.kind: t for t in timings(survey(collectives(4, kinds=("all_reduce", "permute"))), across=False)}
    assert set(found) == set(KINDS)
    assert found["all_gather"].beta_s == pytest.approx(BETA_S)
    assert found["all_to_all"].beta_s == pytest.approx(BETA_S / 4)
    assert timings(survey(collectives(4, kinds=("permute",))), across=False) == ()


def test_a_chip_takes_the_time_that_was_measured():
    chip = fitted_chip(CPU, survey())
    assert chip.launch_s == 5e-6 and chip.memory_bytes == 2**31
    assert chip.memory_s(8e9) == pytest.approx(1.0)
    assert chip.matmul_s(1e9, "float32") == pytest.approx(1e9 / 4e9 + 1.5e-5, rel=1e-9)
    assert chip.matmul_s(1e9, "bfloat16") == pytest.approx(1e9 / 2e9 + 1.5e-5, rel=1e-9)


@pytest.mark.parametrize("special_s, fetch_s", [(2e-9, 5e-8), (0.0, 1e-8), (1e-8, 0.0)])
def test_slow_steps_inside_kernels_come_back(special_s, fetch_s):
    chip = fitted_chip(CPU, survey(compute(special_s=special_s, fetch_s=fetch_s)))
    assert chip.special_s == pytest.approx(special_s, abs=1e-15)
    assert chip.fetch_s == pytest.approx(fetch_s, abs=1e-14)


def test_what_products_and_streams_hide_costs_nothing():
    quick = [Reading("special", 1e5, 1e-6), Reading("window", 1e4, 1e-6, flops=1e6)]
    readings = [r for r in compute() if r.what not in ("special", "window")]
    assert fitted_chip(CPU, survey([*readings, *quick])).special_s == 0
    assert fitted_chip(CPU, survey([*readings, *quick])).fetch_s == 0
    assert fitted_chip(CPU, survey(readings)).fetch_s == CPU.fetch_s == 0


def test_a_stream_is_no_faster_than_profiled_kernels():
    h200 = find_chip("h200")
    reached = h200.memory_bandwidth * h200.memory_efficiency
    for bandwidth in (0.5 * reached, 1.2 * reached):
        chip = fitted_chip(h200, survey([Reading("memory", 1e9, 1e9 / bandwidth)]))
        assert chip.memory_bandwidth == pytest.approx(bandwidth)
        assert chip.memory_s(1e9) == pytest.approx(1e9 / min(bandwidth, reached))


def test_types_that_were_not_measured_follow_those_that_were():
    chip = fitted_chip(CPU, survey(compute(float32=CPU.peak_flops("float32") / 10, bfloat16=1e9)))
    assert chip.peak_flops("float64") == pytest.approx(CPU.peak_flops("float64") / 10)
    assert chip.peak_flops("float16") == pytest.approx(1e9)
    assert chip.vector_flops == pytest.approx(CPU.vector_flops / 10)


def test_every_figure_says_whether_it_was_measured():
    sure = {f.name: (f.sure, f.date) for f in fitted_chip(CPU, survey()).figures}
    assert sure["flops.float32"] == sure["memory_bandwidth"] == sure["launch_s"] == ("measured", "2026-01-02")
    assert sure["flops.float64"][0] == sure["vector_flops"][0] == "assumed"


def test_without_readings_the_catalogue_stays():
    assert fitted_chip(CPU, survey([], memory_bytes=None)) == CPU
