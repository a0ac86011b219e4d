"""The work of one operation and its time: what splits it, and what does not."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshwright as mw
from meshwright.cost.attention import backward_flops
from meshwright.cost.load import Load
from meshwright.cost.rates import measured_rates
from meshwright.cost.work import alignment, attention_call, loads_of
from meshwright.graph import trace
from meshwright.hardware import find_chip
from meshwright.rules import loop_nest
from meshwright.rules.base import Loop, LoopNest, Signature, TensorType
from meshwright.zoo.attention import attend

CHIP = replace(find_chip("cpu"), fetch_s=1e-8, special_s=1e-9)


def compute_s(chip, op, nest, parts, moved, *more):
    return measured_rates(chip).loads_s(loads_of(chip, op, nest, np.array(parts), np.array(moved), *more))


def ops(function, *shapes):
    return trace(function, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).graph.ops


def convolution(kind="forward", stride=1, batch=4, side=8, inputs=3, outputs=6, window=3, groups=1):
    """The operation of a convolution or of one of its gradients."""

    def forward(x, w):
        layout = ("NHWC", "HWIO", "NHWC")
        strides = (stride, stride)
        return lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=layout, feature_group_count=groups)

    x, w = (batch, side, side, inputs), (window, window, inputs // groups, outputs)
    y = (batch, -(-side // stride), -(-side // stride), outputs)
    functions = {
        "forward": (forward, x, w),
        "inputs": (lambda y, w: jax.vjp(lambda x: forward(x, w), jnp.zeros(x))[1](y)[0], y, w),
        "weights": (lambda x, y: jax.vjp(lambda w: forward(x, w), jnp.zeros(w))[1](y)[0], x, y),
    }
    return next(op for op in reversed(ops(*functions[kind])) if op.primitive == "conv_general_dilated")


@pytest.mark.parametrize(
    "options, fetches",
    [
        ({}, 4 * 8 * 8 * 3),  # rows
        ({"outputs": 60}, 4 * 8 * 8 * 3),  # features come along
        ({"inputs": 30}, 4 * 8 * 8 * 3),
        ({"stride": 2}, 4 * 4 * 4 * 3),
        ({"groups": 3}, 3 * 4 * 8 * 8 * 3),
        ({"kind": "inputs"}, 4 * 8 * 8 * 3),
        ({"kind": "weights"}, 3 * 9 * 8),  # here the batch is what comes along
        ({"kind": "weights", "stride": 2}, 4 * 3 * 9 * 4),  # but not where the rows have holes
    ],
    ids=str,
)
def test_a_convolution_fetches_what_lies_under_its_windows(options, fetches):
    assert loop_nest(convolution(**options).signature).num_fetches == fetches


def test_splitting_features_does_not_spread_the_fetches():
    op = convolution()
    nest, parts, moved = loop_nest(op.signature), [1, 2, 2], [0.0] * 3
    fetches = nest.num_fetches / np.array([1, 2, 1])
    whole, batch, features = compute_s(CHIP, op.signature, nest, parts, moved, fetches)
    assert whole > features > batch
    assert features - batch == pytest.approx(1e-8 * nest.num_fetches / 2)


@pytest.mark.parametrize("function, is_special", [(jnp.tanh, True), (jnp.sqrt, True), (jnp.negative, False)])
def test_special_functions_cost_time_even_where_nothing_is_moved(function, is_special):
    (op,) = ops(function, (32, 8))
    nest = loop_nest(op.signature)
    seconds = compute_s(CHIP, op.signature, nest, [1, 8], [0.0, 0.0])
    assert seconds.tolist() == pytest.approx([256e-9, 32e-9] if is_special else [0, 0])


def test_catalogued_chips_hide_both():
    chip = find_chip("h100")
    assert chip.fetch_s == chip.special_s == 0


def test_products_whose_rows_are_not_multiples_of_16_bytes_are_slower_on_gpus():
    def product(vocab):
        shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 64), (64, vocab))]
        return trace(lambda x, w: x @ w, *shapes).graph.ops[0].signature

    h200 = find_chip("h200")
    assert [alignment(h200, product(n)) for n in (256, 252, 250, 257)] == sorted([0.43, 0.65, 0.85, 1.0], reverse=True)
    assert alignment(find_chip("tpu-v5p"), product(257)) == alignment(None, product(257)) == 1.0


def test_fused_attention_is_slower_than_products_of_as_many_flops():
    tensor = TensorType((256, 1024, 8, 64), "bfloat16", 2)
    op = Signature("dot_product_attention_fwd_wrapper", {}, (tensor,) * 3, (tensor,))
    nest = LoopNest((Loop(256),), (((0,),),) * 3, (((0,),),), 2.0 * 256 * 1024 * 1024 * 8 * 64, leads=True)
    call = attention_call(op, nest)
    assert (call.backward, call.keys, call.head_dim) == (False, 512.0, 64)
    ordinary = replace(op, primitive="dot_general_of_another_name")
    fused, product = (compute_s(find_chip("h200"), one, nest, [1], [0.0]) for one in (op, ordinary))
    assert 1.2 * product[0] < fused[0] < 4 * product[0]


def test_splash_attention_takes_what_its_table_of_rates_says():
    """All kernels of a training step together, as the simulator prices a recipe's layer."""
    batch, seq, heads, width = 4, 4096, 8, 128
    q = jax.ShapeDtypeStruct((batch, seq, heads, width), jnp.bfloat16)
    cluster = mw.cluster("1x4 tpu-v5p")
    loss = jax.grad(lambda q: attend(q, q, q, causal=True).astype(jnp.float32).sum())
    chip, seconds = cluster.chip, []
    for op in trace(loss, q, cluster=cluster).graph.ops:
        if op.primitive == "pallas_call":
            nest = loop_nest(op.signature)
            seconds += compute_s(chip, op.signature, nest, [1], [0.0]).tolist()
    prices = measured_rates(chip)
    flops = 4.0 * batch * heads * seq * seq / 2 * width
    forward = prices.attention_s("splash", flops, seq, width, backward=False)
    backward = prices.attention_s("splash", backward_flops("splash") * flops, seq, width, backward=True)
    # Blocks of 512 on the diagonal are computed whole: an eighth more scores than the mask leaves.
    assert sum(seconds) == pytest.approx((forward + backward) * (1 + 512 / seq), rel=0.03)


@pytest.mark.parametrize("function", [jnp.tanh, lambda x: x @ x, lambda x: x + 1], ids=["special", "product", "moved"])
def test_what_a_plan_records_costs_what_the_strategy_was_priced_at(function):
    op = ops(function, (32, 32))[-1]
    nest, parts, moved = loop_nest(op.signature), np.array([3, 1]), np.array([7e5, 2e6])
    loads = loads_of(CHIP, op.signature, nest, parts, moved, kernel=True)
    rates = measured_rates(CHIP)
    assert rates.load_s(loads.first) == rates.loads_s(loads)[0] > 0
    assert loads.first.flops == nest.flops / 3


def test_measured_rates_are_the_chips_own():
    chip, load = find_chip("h100"), Load(1e12, 1e6, "bfloat16", True, 1.0, False)
    assert measured_rates(chip).load_s(load) == chip.matmul_s(1e12, "bfloat16")
    moving = measured_rates(chip).load_s(replace(load, flops=1e3, num_bytes=1e9))
    assert moving == chip.launch_s + chip.memory_s(1e9)  # a product starts once, whatever it waits for
    assert measured_rates(chip).load_s(replace(load, flops=0.0)) == chip.launch_s + chip.memory_s(1e6)


def test_float32_slows_the_arithmetic_of_a_product_and_not_its_bytes():
    op = ops(lambda x: x @ x, (32, 32))[-1]
    nest, once = loop_nest(op.signature), np.array([1])
    load = loads_of(find_chip("h200"), op.signature, nest, once, np.array([1e6])).first
    assert load.aligned == 1 and 0 < load.useful < 1
