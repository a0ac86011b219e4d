"""Blocks and segments: how many there are in known models, what they hold, and what fingerprints tell apart."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.blocks import blocks_of as blocks_of_graph
from meshwright.graph import trace

pytestmark = pytest.mark.slow


@cache
def blocks_of(name, **sizes):
    model = zoo.build(name, **sizes)
    return mw.find_blocks(model.train_step, model.state, model.batch)


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("name", "space"),
    [
        ("gpt-tiny", "3·3·3·3"),
        ("llama-tiny", "3·3·3·3"),
        ("bert-tiny", "3·3·3·3"),
        ("moe-tiny", "3·3·3·4·4·3·3·3·3"),  # a layer with experts and one without
        ("mixtral-tiny", "3·3·3·4·4"),
    ],
)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_layer_has_the_published_number_of_blocks(name, space, checkpoint):
    found = blocks_of(name, layers=two_layers(name), checkpoint=checkpoint)
    segment = max(found.segments, key=lambda s: len(s.occurrences))
    assert segment.space == space
    assert len(segment.occurrences) == 2


def two_layers(name):
    """How many layers are two of those that are alike."""
    return 4 if name == "moe-tiny" else 2


def test_a_wide_resnet_has_one_block_per_convolution_and_one_for_its_head():
    found = blocks_of("wide-resnet-tiny")
    convolutions = [op for op in found.graph.ops if op.primitive == "conv_general_dilated" and op.phase == "forward"]
    assert len(found.blocks) == len(convolutions) + 1
    assert all(block.choices == ("rows", "columns", "contracted") for block in found.blocks)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "moe-tiny"])
def test_segments_do_not_depend_on_depth(name):
    few, many = (blocks_of(name, layers=n * two_layers(name), checkpoint=False) for n in (1, 2))
    assert [s.fingerprint for s in few.segments] == [s.fingerprint for s in many.segments]
    assert max(len(s.occurrences) for s in many.segments) == 2 * max(len(s.occurrences) for s in few.segments)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_bodies_of_scans_are_entered(checkpoint):
    few, many = (blocks_of("gpt-tiny", layers=n, scan=True, checkpoint=checkpoint) for n in (3, 9))
    assert [s.fingerprint for s in few.segments] == [s.fingerprint for s in many.segments]
    layer = many.segments[1]
    assert (layer.space, len(layer.occurrences), layer.trips, layer.count) == ("3·3·3·3", 1, 9, 9)
    assert all(block.trips == (9 if block.number in layer.blocks else 1) for block in many.blocks)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("options", [{}, {"checkpoint": True}, {"scan": True}, {"scan": True, "checkpoint": True}])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "moe-tiny"])
def test_gradients_belong_to_the_contraction_they_are_of(name, options):
    found = blocks_of(name, **options)
    for block in found.blocks:
        dots = [c for c in block.contractions if c.label.endswith("dot_general")]
        # The zoo's einsums are scopes: JAX keeps them on gradients, and nothing but this test reads them.
        forward = sorted(einsum(c.label) for c in dots if c.phase == "forward")
        recomputed = sorted(einsum(c.label) for c in dots if found.graph.ops[c.operation].recomputed)
        gradients = [c for c in dots if c.phase == "backward" and not found.graph.ops[c.operation].recomputed]
        assert set(recomputed) <= set(forward)
        if not block.label.endswith("gather"):
            assert sorted(einsum(c.label) for c in gradients) == differentiated(forward)


def einsum(label):
    return re.search(r"\w+,\w+->\w+", label).group()


def differentiated(einsums):
    """Each einsum twice; GShard's routing to buffers is not differentiated by the mask, which is of comparisons."""
    return sorted(e for e in einsums for _ in range(1 if e == "gsec,gsd->egcd" else 2))


@pytest.mark.parametrize("name", ["gpt-tiny", "moe-tiny", "wide-resnet-tiny", "unet-tiny"])
def test_every_operation_is_in_one_block_or_in_none(name):
    found = blocks_of(name)
    ops = [*found.rest, *(op for b in found.blocks for op in (*b.operations, *b.updates))]
    assert sorted(ops) == list(range(len(found.graph.ops)))
    led = {c.operation for block in found.blocks for c in block.contractions}
    products = {i for i, op in enumerate(found.graph.ops) if op.primitive in ("dot_general", "conv_general_dilated")}
    assert products <= led
    # Each occurrence of a segment holds the operations of its blocks.
    for segment in found.segments:
        for operations, numbers in zip(segment.occurrences, segment.block_numbers, strict=True):
            assert set(operations) == {op for n in numbers for op in found.blocks[n].operations}
        assert segment.operations in segment.occurrences


def test_updates_belong_to_the_block_of_their_parameter():
    found = blocks_of("gpt-tiny")
    graph = found.graph
    layer = found.segments[1].blocks
    sizes = {
        tuple(graph.types[v].shape) for n in layer for op in found.blocks[n].updates for v in graph.ops[op].outputs
    }
    assert {(64, 4, 16), (4, 16, 64), (64, 256), (256, 64)} <= sizes
    assert (256, 64, 64) not in sizes


def layer(weights, x):
    return jax.nn.relu(x @ weights["in"]) @ weights["out"] + x


def test_fingerprints_do_not_depend_on_names_or_position():
    def renamed(weights, x):
        x = jnp.tanh(x)
        return layer({"in": weights["zz"], "out": weights["aa"]}, x)

    one = mw.find_blocks(layer, {"in": array(32, 64), "out": array(64, 32)}, array(16, 32))
    other = mw.find_blocks(renamed, {"zz": array(32, 64), "aa": array(64, 32)}, array(16, 32))
    assert one.blocks[1].fingerprint == other.blocks[1].fingerprint


def test_fingerprints_tell_shapes_and_types_and_work_apart():
    def found(function, *args):
        return mw.find_blocks(function, *args).blocks[0].fingerprint

    x, w = array(16, 32), array(32, 8)
    others = [
        found(lambda x, w: x @ w, x, w),
        found(lambda x, w: x @ w, array(32, 32), w),
        found(lambda x, w: jnp.tanh(x @ w), x, w),
        found(lambda x, w: x.astype("bfloat16") @ w.astype("bfloat16"), x, w),
        found(jax.grad(lambda x, w: jnp.sum(x @ w)), x, w),
    ]
    assert len(set(others)) == len(others)


def test_siblings_that_meet_are_one_block_and_dependants_are_not():
    def gated(x, gate, up, down):
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    def chained(x, gate, up, down):
        hidden = x @ gate
        return (hidden + hidden @ up) @ down

    x = array(16, 32)
    assert len(mw.find_blocks(gated, x, array(32, 64), array(32, 64), array(64, 32)).blocks) == 2
    assert len(mw.find_blocks(chained, x, array(32, 64), array(64, 64), array(64, 32)).blocks) == 3


def test_attention_with_queries_keys_and_values_in_one_product_is_one_block():
    def attention(x, qkv, out):
        q, k, v = jnp.moveaxis(jnp.einsum("bsd,dcnh->bscnh", x, qkv), 2, 0)
        mixed = jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", q, k)), v)
        return jnp.einsum("bsnh,nhd->bsd", mixed, out)

    found = mw.find_blocks(attention, array(4, 16, 32), array(32, 3, 5, 8), array(5, 8, 32))
    assert [len(block.contractions) for block in found.blocks] == [3, 1]
    assert found.blocks[0].entries[0].sizes["columns"] == (3, 5, 8)


def test_a_program_without_contractions_has_no_blocks():
    found = mw.find_blocks(lambda x: jnp.tanh(x) + 1, array(8))
    assert (found.blocks, found.segments, len(found.rest)) == ((), (), 2)
    assert "0 blocks" in str(found)


def test_blocks_print_as_a_table_and_as_one_line():
    found = blocks_of("gpt-tiny", layers=8)
    assert repr(found) == "Blocks(34 blocks, 3 unique segments of 10)"
    text = str(found)
    assert "blocks 1–4, search space 3·3·3·3 = 81; blocks 5–8, 9–12, 13–16 and 4 more like 1–4" in text
    assert "rows 8×32" in text
    assert found.to_json()["segments"][1]["space"] == "3·3·3·3"


@pytest.mark.parametrize("cluster", [None, "1x8 h100"])
def test_fused_attention_and_a_loss_in_chunks_leave_all_layers_alike(cluster):
    machine = None if cluster is None else mw.cluster(cluster)  # for GPUs attention is one kernel

    def found(layers):
        model = zoo.build("gpt2-125m", layers=layers, batch=16)
        return blocks_of_graph(trace(model.train_step, model.state, model.batch, cluster=machine).graph)

    few, many = found(2), found(5)
    assert [s.fingerprint for s in few.segments] == [s.fingerprint for s in many.segments]
    layer = max(many.segments, key=lambda s: len(s.occurrences))
    assert (layer.space, len(layer.occurrences)) == ("3·3·3·3", 5)
    kernels = [op.primitive for op in many.graph.ops if "attention" in op.primitive]
    assert bool(kernels) == (cluster is not None)
