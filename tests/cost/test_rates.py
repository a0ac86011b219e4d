"""Rates' times: larger products are more efficient, narrower types faster, and chips differ by generation."""

import pytest

from meshwright.cost.attention import attention_kernels, generation
from meshwright.cost.load import Load
from meshwright.cost.rates import measured_rates, step_rates
from meshwright.hardware import chips, find_chip


@pytest.mark.parametrize("chip", chips(), ids=lambda chip: chip.name)
def test_every_chip_has_prices(chip):
    prices = step_rates(chip)
    sizes = [1e9, 1e11, 1e13]
    rates = [size / prices.product_s(size) for size in sizes]
    assert rates == sorted(rates)
    assert rates[-1] < max(chip.peak_flops("bfloat16"), chip.peak_flops("float16"))
    for kernel in attention_kernels():
        assert prices.attention_s(kernel, 1e12, 4096, 128, backward=False) > 0


def test_products_are_bound_by_arithmetic_or_by_memory():
    prices = step_rates(find_chip("h100"))
    assert prices.product_s(1e12, 1e3) == prices.product_s(1e12)
    assert prices.product_s(1e6, 1e12) == pytest.approx(prices.stream_s(1e12), rel=1e-4)


def test_8_bit_products_are_faster_but_not_twice():
    prices = step_rates(find_chip("h100"))
    ratio = prices.product_s(1e13) / prices.product_s(1e13, dtype="float8_e4m3fn")
    assert 1.4 < ratio < 2.0


def test_a_v100_multiplies_in_float16():
    chip = find_chip("v100-16gb")
    assert 1e13 / step_rates(chip).product_s(1e13) > 0.5 * chip.peak_flops("float16")


def test_attention_ramps_up_with_length_and_heads():
    prices = step_rates(find_chip("a100-80gb"))
    times = [prices.attention_s("flash2", 1e12, seq, 128, backward=False) for seq in (512, 2048, 8192)]
    assert times == sorted(times, reverse=True)
    assert prices.attention_s("flash2", 1e12, 2048, 64, backward=False) > times[1]


def test_later_attention_kernels_are_faster():
    prices = step_rates(find_chip("h100"))
    times = [prices.attention_s(name, 1e12, 4096, 128, backward=True) for name in ("flash1", "flash2", "cudnn")]
    assert times == sorted(times, reverse=True)


def test_generations_are_looked_up_by_exact_name():
    assert generation(find_chip("h200")) == "hopper"
    assert generation(find_chip("cpu")) == "other"


def test_a_measured_chip_is_taken_at_its_word():
    chip = find_chip("cpu")
    prices = measured_rates(chip)
    assert prices.product_s(1e12, dtype="float32") == pytest.approx(chip.matmul_s(1e12, "float32"))
    load = Load(0.0, 1e9, "float32", False, 1.0, False)
    assert prices.load_s(load) == pytest.approx(chip.memory_s(1e9))
