"""Traffic of kernels: how often each value is read from and written to memory."""

import jax
import jax.numpy as jnp
import pytest

from meshwright.cost.xla_gpu.liveness import liveness
from meshwright.cost.xla_gpu.traffic import plain_traffic
from tests.graph.examples import shaped, traced


class Moved:
    """The traffic of a function, by the primitives of its operations."""

    def __init__(self, function, *args, num_devices=None):
        self.graph, nests = traced(function, *args)
        self.traffic = liveness(self.graph, nests, num_devices).traffic

    def ops(self, primitive):
        return [index for index, op in enumerate(self.graph.ops) if op.primitive == primitive]

    def written(self, primitive):
        """How often the first result of each operation of a primitive is written."""
        return [float(self.traffic.writes[self.graph.ops[i].outputs[0]]) for i in self.ops(primitive)]

    def read(self, value):
        """How often kernels read a value."""
        return float(self.traffic.reads[self.graph.columns.reads == value].sum())

    def result(self, primitive, number=0):
        return self.graph.ops[self.ops(primitive)[number]].outputs[0]


def test_a_kernel_reads_a_value_once_and_does_not_write_what_it_computes_internally():
    moved = Moved(lambda x: jnp.sin(x) * x + x, shaped(8, 8))
    assert moved.read(moved.graph.inputs[0]) == 1
    assert (moved.written("sin"), moved.written("mul"), moved.written("add")) == ([0], [0], [1])
    assert moved.traffic.starts.sum() == 1 and moved.traffic.computed.tolist() == [1, 1, 1]


def test_without_the_model_every_operation_is_a_kernel():
    graph, _ = traced(lambda x: jnp.sin(x) * x + x, shaped(8, 8))
    plain = plain_traffic(graph)
    assert plain.reads.tolist() == [1] * 5 and plain.writes.all() and plain.starts.all()


def test_a_cheap_value_is_computed_in_each_kernel_that_needs_it():
    moved = Moved(lambda x: (-x).sum(0) @ (-x).sum(1), shaped(32, 32))
    (value,) = moved.graph.inputs
    assert moved.written("neg") == [0] * len(moved.ops("neg"))
    assert moved.read(value) == 2  # rows and columns are reduced by different kernels


@pytest.mark.parametrize("num_readers, is_stored", [(2, False), (6, True)])
def test_a_sum_of_two_is_stored_where_many_kernels_would_compute_it(num_readers, is_stored):
    def function(x, y, w):
        total = x @ w + y @ w
        parts, peak = [], total.max(1, keepdims=True)
        for _ in range(num_readers - 1):  # each waits for the one before
            peak = jnp.sin(total - peak).sum(1, keepdims=True)
            parts.append(peak)
        return parts

    moved = Moved(function, shaped(64, 64), shaped(64, 64), shaped(64, 64))
    assert moved.written("add")[0] == is_stored


def test_kernels_that_share_an_operand_are_one():
    def function(x, w):
        y = x @ w
        bent = jnp.tanh(y)
        return bent, bent * y

    moved = Moved(function, shaped(64, 64), shaped(64, 64))
    assert moved.read(moved.result("dot_general")) == 1 and moved.read(moved.result("tanh")) == 0
    assert (moved.written("tanh"), moved.written("mul")) == ([1], [1])
    assert moved.traffic.starts.sum() == 2  # the product, and both others


def test_kernels_that_wait_for_a_third_are_several():
    def softmax(x, w):
        y = x @ w
        raised = jnp.exp(y - y.max(1, keepdims=True))
        return (raised / raised.sum(1, keepdims=True)) @ w

    moved = Moved(softmax, shaped(64, 64), shaped(64, 64))
    assert moved.read(moved.result("dot_general")) == 3  # the greatest, the sum, the quotient
    assert moved.traffic.computed[moved.ops("exp")].tolist() == [2]


def test_an_optimizer_reads_and_writes_its_state():
    def update(state, gradient):
        momentum = 0.9 * state["m"] + gradient
        return {"m": momentum, "p": state["p"] - 0.1 * momentum}

    moved = Moved(update, {"m": shaped(64, 64), "p": shaped(64, 64)}, shaped(64, 64))
    assert [moved.read(value) for value in moved.graph.inputs] == [1, 1, 1]
    assert [moved.traffic.writes[value] for value in moved.graph.outputs] == [1, 1]
    assert moved.traffic.starts.sum() == 1


def test_a_gather_reads_as_much_as_it_takes_and_a_scatter_leaves_the_rest_in_place():
    def function(x, w, labels):
        logits = (x @ w).astype(jnp.float32)
        return jnp.take_along_axis(logits, labels[:, None], axis=1)

    half = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    moved = Moved(function, half, half, jax.ShapeDtypeStruct((64,), jnp.int32))
    assert moved.read(moved.result("dot_general")) == pytest.approx(1 / 64)
    moved = Moved(lambda x, y: (x @ x).at[:4].add(y), shaped(64, 64), shaped(4, 64))
    assert moved.read(moved.result("dot_general")) == 0


@pytest.mark.parametrize("transposed", [False, True])
def test_a_kernel_that_transposes_does_not_reduce(transposed):
    def function(x, y):
        product = (x @ x) * ((y @ y).T if transposed else y @ y)
        return product.sum(1)

    moved = Moved(function, shaped(64, 64), shaped(64, 64))
    assert moved.written("mul") == [transposed]


@pytest.mark.parametrize(
    "batch, num_devices, is_relaid", [(64, 1, True), (64, 4, False), (16, 1, False), (64, None, False)]
)
def test_sums_over_a_large_batch_turn_the_values_around_them(batch, num_devices, is_relaid):
    """The gradient of a vector for each position; the residual stream has the batch innermost then."""

    def function(x, w):
        y = x @ w
        scaled = y * jnp.sin(y).sum(-1, keepdims=True)
        return scaled.sum(0), (scaled * y).sum(-1)

    moved = Moved(function, shaped(batch, 8, 32), shaped(32, 32), num_devices=num_devices)
    assert (moved.written("sin") == [1]) == is_relaid


@pytest.mark.parametrize("row, lines", [(64, 1.0), (197, 1 + 124 / 788), (25, 1 + 124 / 128)])
def test_rows_that_do_not_start_at_a_cache_line_touch_one_more(row, lines):
    moved = Moved(lambda x: jnp.exp(x).sum(1), shaped(64, row))
    assert moved.read(moved.graph.inputs[0]) == pytest.approx(lines)


def test_values_that_loops_read_are_in_memory():
    def function(x, steps):
        doubled = x * 2
        return jax.lax.scan(lambda carry, step: (carry * doubled + step, None), x, steps)[0]

    moved = Moved(function, shaped(8, 8), shaped(5))
    assert moved.written("mul")[0] == 1


def test_kernels_cut_out_what_a_loop_slices_and_products_read_a_copy():
    def function(carry, gates, weights):
        def body(h, slices):
            gate, weight = slices
            return h * gate @ weight, None

        return jax.lax.scan(body, carry, (gates, weights))[0]

    moved = Moved(function, shaped(64, 64), shaped(5, 64, 64), shaped(5, 64, 64))
    gate, weight = moved.ops("loop_slice")
    assert not moved.traffic.starts[gate] and moved.traffic.starts[weight]
    assert moved.written("loop_slice") == [0, 1]
