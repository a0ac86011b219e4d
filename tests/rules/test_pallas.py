"""Which axes of a grid are loops, why others are not, and what a kernel costs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import meshwright as mw
from meshwright.graph.tracing.trace import trace
from meshwright.rules import Signature, loop_nest
from meshwright.rules.families.pallas import grid_of, why_whole
from tests.pallas_ops import (
    attention,
    decode_attention,
    flash_attention,
    rms_norm,
    splash_attention_kernel,
    splash_attention_mask,
)
from tests.rules.contract import equations, signature_of

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def kernels(function: Callable[..., Any], *args: Any) -> dict[str, Signature]:
    """The Pallas kernels of a function, by name."""
    found = [signature_of(e) for e in equations(jax.make_jaxpr(function)(*args).jaxpr)]
    return {mw.rules.kernel_name(s): s for s in found if s.primitive == "pallas_call"}


def parallel(op: Signature) -> list[tuple[int, ...]]:
    """Sizes of the parallel loops, in the order of the grid."""
    return [loop.size for loop in loop_nest(op).loops if loop.kind == "parallel"]


def copy(in_spec: pl.BlockSpec, out_spec: pl.BlockSpec, grid: tuple[int, ...], reads: bool = False) -> Signature:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] + (pl.program_id(0) if reads else 0)

    call = pl.pallas_call(kernel, X, grid=grid, in_specs=[in_spec], out_specs=out_spec, interpret=True)
    return kernels(call, X)["kernel"]


ROWS = pl.BlockSpec((2, 16), lambda i: (i, 0))
OBSTACLES = {
    "asks for its position": (ROWS, ROWS, (4,), True),
    "an index map computes with it": (pl.BlockSpec((2, 16), lambda i: (3 - i, 0)), ROWS, (4,), False),
    "write to the same block": (ROWS, pl.BlockSpec((2, 16), lambda i: (0, 0)), (4,), False),
    "blocks of two dims": (pl.BlockSpec((2, 4), lambda i: (i, i)), pl.BlockSpec((2, 4), lambda i: (i, i)), (4,), False),
    "do not cover a dim of 8 exactly": (
        pl.BlockSpec((3, 16), lambda i: (i, 0)),
        pl.BlockSpec((3, 16), lambda i: (i, 0)),
        (3,),
        False,
    ),
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_an_axis_that_does_more_than_to_select_blocks_is_no_loop(reason: str) -> None:
    op = copy(*OBSTACLES[reason])
    assert not parallel(op)
    assert reason in why_whole(op)


def test_memory_that_a_result_takes_over_must_be_split_alike() -> None:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[:2]

    def made(in_spec: pl.BlockSpec) -> Signature:
        specs = {"grid": (4,), "in_specs": [in_spec], "out_specs": ROWS, "input_output_aliases": {0: 0}}
        return kernels(pl.pallas_call(kernel, X, interpret=True, **specs), X)["kernel"]

    assert parallel(made(ROWS)) == [4]
    op = made(pl.BlockSpec((8, 16), lambda i: (0, 0)))
    assert not parallel(op) and "takes its memory" in why_whole(op)


def test_an_axis_that_selects_blocks_is_a_loop_and_the_blocks_stay_whole() -> None:
    nest = loop_nest(copy(ROWS, ROWS, (4,)))
    assert nest.operands[0][0][0] == nest.results[0][0][0]
    assert [nest.loops[loop].size for loop in nest.operands[0][0]] == [4, 2]
    assert [nest.loops[loop].kind for loop in nest.operands[0][0]] == ["parallel", "unsplittable"]


Q = jax.ShapeDtypeStruct((4, 128, 8, 64), jnp.bfloat16)
CAUSAL = attention.BlockSizes(32, 32, 32, 32, 32, 32)


def loss(q: Any, k: Any, v: Any) -> Any:
    return attention.mha(q, k, v, None, causal=True, block_sizes=CAUSAL).astype(jnp.float32).sum()


def test_attention_for_gpus_has_loops_over_batch_and_heads() -> None:
    found = kernels(jax.grad(loss, argnums=(0, 1, 2)), Q, Q, Q)
    assert parallel(found["mha_forward"]) == [4, 8]
    assert parallel(found["mha_backward"]) == [4, 8]
    assert sorted(parallel(found["mha_preprocess_backward"])) == [4, 4, 8]


def test_decoding_has_loops_over_batch_and_key_heads() -> None:
    q, kv = jax.ShapeDtypeStruct((4, 32, 64), jnp.float32), jax.ShapeDtypeStruct((4, 512, 2, 64), jnp.float32)
    (op,) = kernels(decode_attention.gqa, q, kv, kv).values()
    assert parallel(op)[:2] == [4, 2]


def test_a_norm_has_loops_over_rows_except_where_rows_are_added_up() -> None:
    x, w = jax.ShapeDtypeStruct((4, 8, 256), jnp.float32), jax.ShapeDtypeStruct((256,), jnp.float32)
    found = kernels(jax.grad(lambda *args: rms_norm.rms_norm(*args).sum(), argnums=(0, 1, 2)), x, w, w)
    assert parallel(found["rms_forward"]) == [4, 8]
    assert parallel(found["ln_backward_dx"]) == [32]
    assert not parallel(found["ln_backward_dw_db"])


T = jax.ShapeDtypeStruct((4, 8, 256, 128), jnp.float32)


def splash(q: Any, k: Any, v: Any) -> Any:
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((256, 256))] * 8)
    kernel = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    return jax.vmap(kernel)(q, k, v).sum()


def test_attention_for_tpus_is_planned_and_split() -> None:
    for function in (lambda *args: flash_attention.flash_attention(*args, causal=True).sum(), splash):
        gradients = jax.grad(function, argnums=(0, 1, 2))
        assert all(4 in parallel(op) for op in kernels(gradients, T, T, T).values())
        plan = mw.plan(gradients, T, T, T, cluster="1x4 tpu-v5p")
        assert not plan.unsplittable
        loads = [op.load for op in plan.ops if op.label.endswith("pallas_call")]
        assert {(load.num_parts, load.dtype) for load in loads if load} == {(4, "float32")}


def test_a_kernel_for_other_chips_is_named_with_the_remedy() -> None:
    def flash(q: Any) -> Any:
        return flash_attention.flash_attention(q, q, q)

    (remark,) = mw.plan(flash, T, cluster="1x4 h100").remarks
    assert "written for chips of Google and does not run on h100-sxm-80gb: call one that is written for" in remark
    assert not mw.plan(flash, T, cluster="1x4 tpu-v5p").remarks


def test_a_kernel_that_closes_over_references_is_planned() -> None:
    """Mosaic GPU kernels are jaxprs with constants of their own."""
    ops = pytest.importorskip("jax.experimental.pallas.ops.gpu.ragged_dot_mgpu")
    blocks = {"block_m": 64, "block_n": 64, "block_k": 64, "max_concurrent_steps": 2, "grid_block_n": 2}
    half, sizes = jnp.float16, jax.ShapeDtypeStruct((4,), jnp.int32)
    operands = (jax.ShapeDtypeStruct((256, 128), half), jax.ShapeDtypeStruct((4, 128, 256), half), sizes)
    plan = mw.plan(lambda x, w, n: ops.ragged_dot(x, w, group_sizes=n, **blocks), *operands, cluster="1x4 h100")
    assert [tensor.shape for tensor in plan.results] == [(256, 256)]


def test_a_kernel_that_cannot_be_split_is_named_with_the_reason() -> None:
    x, w = jax.ShapeDtypeStruct((4, 8, 256), jnp.float32), jax.ShapeDtypeStruct((256,), jnp.float32)
    plan = mw.plan(jax.grad(lambda w, x: rms_norm.rms_norm(x, w, w).sum()), w, x, cluster="1x8 h100")
    assert "ln_backward_dw_db" in plan.unsplittable
    (remark,) = plan.remarks
    assert (
        "whole Pallas kernel 'ln_backward_dw_db': along axis 0 of its grid the kernel asks for its position" in remark
    )
    assert '@mw.rule("ln_backward_dw_db")' in remark


def test_flops_are_those_of_the_blocks_that_a_causal_mask_leaves() -> None:
    op = kernels(loss, Q, Q, Q)["mha_forward"]
    blocks = 4 * 8 * (1 + 2 + 3 + 4)  # batch, heads, and the blocks of keys for each block of queries
    assert loop_nest(op).flops == blocks * 2 * 2 * 32 * 32 * 64
    backward = kernels(jax.grad(loss, argnums=(0, 1, 2)), Q, Q, Q)["mha_backward"]
    assert loop_nest(backward).flops == blocks * 7 * 2 * 32 * 32 * 64  # scores are computed twice


def test_flops_of_blocks_that_a_table_of_constants_skips_do_not_count() -> None:
    graph = trace(jax.grad(splash, argnums=(0, 1, 2)), T, T, T).graph
    found = {mw.rules.kernel_name(op.signature): op.signature for op in graph.ops if op.primitive == "pallas_call"}
    blocks, product = 4 * 8 * 3, 2 * 128**3  # batch, heads, and 1 + 2 of 2 × 2 blocks of 128 tokens
    num_products = {"splash_mha_fwd_residuals": 2, "splash_mha_dkv_no_residuals": 4, "splash_mha_dq_no_residuals": 3}
    assert {name: loop_nest(op).flops / product / blocks for name, op in found.items()} == num_products


def test_flops_of_skipped_blocks_do_not_count() -> None:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        @pl.when(pl.program_id(0) <= pl.program_id(1))
        def _() -> None:
            out_ref[...] = x_ref[...] @ x_ref[...]

    square = pl.BlockSpec((4, 4), lambda i, j: (i, j))
    call = pl.pallas_call(
        kernel, jax.ShapeDtypeStruct((16, 16), jnp.float32), grid=(4, 4), in_specs=[square], out_specs=square
    )
    (op,) = kernels(call, jax.ShapeDtypeStruct((16, 16), jnp.float32)).values()
    assert loop_nest(op).flops == 10 * 2 * 4**3


def test_an_estimate_by_the_author_is_used() -> None:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...]

    call = pl.pallas_call(kernel, X, cost_estimate=pl.CostEstimate(flops=123, transcendentals=0, bytes_accessed=9))
    (op,) = kernels(call, X).values()
    assert loop_nest(op).flops == 123
    assert grid_of(op).sizes == ()


def test_a_grid_whose_size_is_not_known_is_not_split() -> None:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...]

    def dynamic(count: Any, x: Any) -> Any:
        specs = {"grid": (count,), "in_specs": [ROWS], "out_specs": ROWS, "interpret": True}
        return pl.pallas_call(kernel, X, **specs)(x)

    op = kernels(dynamic, jax.ShapeDtypeStruct((), jnp.int32), X)["kernel"]
    assert mw.rules.has_rule(op) and not parallel(op)
    assert "along axis 0 of its grid its size is not known before it runs" in why_whole(op)
