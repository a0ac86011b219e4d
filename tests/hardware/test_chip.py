"""Rates and times of one device."""

import numpy as np
import pytest

from meshwright.hardware import chips, find_chip


def test_matrix_rates_by_type():
    chip = find_chip("h100")
    assert chip.peak_flops("bfloat16") == chip.peak_flops("float16") == pytest.approx(989.4e12)
    assert chip.peak_flops("float8_e4m3fn") == chip.peak_flops("float8_e5m2") == pytest.approx(1979e12)
    assert chip.peak_flops("int8") == pytest.approx(1979e12)
    assert chip.peak_flops("float64") < chip.peak_flops("float32") < chip.peak_flops("bfloat16")


def test_float32_products_are_priced_as_jax_runs_them():
    assert find_chip("a100").peak_flops("float32") == pytest.approx(156e12)  # TF32
    assert find_chip("v100").peak_flops("float32") == pytest.approx(15.7e12)  # no TF32 before Ampere
    assert find_chip("tpu-v4").peak_flops("float32") == find_chip("tpu-v4").peak_flops("bfloat16")  # one bfloat16 pass


def test_a_type_without_a_unit_falls_back_to_a_wider_one():
    chip = find_chip("a100")
    assert chip.peak_flops("float8_e4m3fn") == chip.peak_flops("bfloat16")
    assert chip.peak_flops("int32") == chip.vector_flops


def test_matmul_follows_the_efficiency_curve():
    chip = find_chip("a100-80gb")
    half = chip.half_flops
    assert half / chip.matmul_s(half) == pytest.approx(chip.best_fraction / 2 * 312e12)
    assert 1e15 / chip.matmul_s(1e15) == pytest.approx(chip.best_fraction * 312e12, rel=1e-4)
    assert chip.matmul_s(0) == 0.0


def test_matmul_waits_for_memory_where_that_is_slower():
    chip = find_chip("h100")
    assert chip.matmul_s(1e9, "bfloat16", 1e10) == chip.memory_s(1e10)


def test_times_are_vectorised():
    chip = find_chip("h100")
    flops = np.array([0.0, 1e9, 1e12])
    times = chip.matmul_s(flops, "bfloat16")
    assert times.shape == (3,)
    assert [chip.matmul_s(f) for f in flops] == pytest.approx(times.tolist())
    assert isinstance(chip.matmul_s(1e9), float)
    assert chip.memory_s(np.array([1.0, 2.0])).shape == (2,)


@pytest.mark.parametrize("chip", chips(), ids=lambda chip: chip.name)
def test_every_chip_is_sane(chip):
    assert 2**33 <= chip.memory_bytes <= 2**38
    assert 0 < chip.best_fraction <= 1
    assert 0 < chip.memory_efficiency <= 1
    assert chip.launch_s > 0
    assert chip.matmul_s(1e12, "bfloat16") > 0
    assert chip.peak_flops("float64") <= chip.peak_flops("float32") <= chip.peak_flops("float16") or chip.name == "cpu"
    assert hash(chip) == hash(find_chip(chip.name))
