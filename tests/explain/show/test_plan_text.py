"""What is printed of a plan: one screen, and tables of tensors."""

import jax
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.console import plain_text
from meshwright.explain.show.tensor_table import TensorTable
from meshwright.units import format_bytes
from tests.explain.plans import plan_of, tensor_parallel


def test_a_plan_prints_on_one_screen():
    text = str(tensor_parallel())
    assert len(text.splitlines()) <= 50 and max(map(len, text.splitlines())) <= 118
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[1] == "verdict Data parallel over 4 groups of 2 devices, tensor parallel over groups of 2 devices"
    assert lines[2].startswith("data parallel ×4 over x, Megatron tensor parallel ×2 over y")
    assert "state/params/layers/*/up  (2×: 0–1)" in text and "D F_y" in text and "tensor (column)" in text
    assert "optimizer state" in text


def test_a_table_of_tensors_says_all_of_each():
    table = tensor_parallel().show("state/params/layers/*/up*")
    rows = {row.path: row for row in table.rows}
    row = rows["state/params/layers/*/up"]
    assert (row.symbols, row.words) == ("D F_y", "feed-forward split over y (2 parts)")
    assert row.paths == ("state/params/layers/0/up", "state/params/layers/1/up")
    assert row.bytes_on_device == 64 * 256 * 4 // 2 and row.kind == "tensor (column)"
    assert "feed-forward split over y" in plain_text(table, 200)


@pytest.mark.parametrize("width", [80, 118])
def test_no_column_of_a_table_is_pushed_out(width):
    table = plan_of("gpt-tiny", (4, 2), mw.Zero(3)).show("state/params/*")
    for row in table.rows:
        assert format_bytes(row.bytes_on_device) in plain_text(TensorTable((row,)), width)
    head = plain_text(table, width)
    assert "on a device" in head and max(map(len, head.splitlines())) <= width


def test_throughput_counts_tokens_only_where_there_are_any():
    said = {}
    for name in ("gpt-tiny", "mlp"):
        model = zoo.build(name, batch=8)
        plan = mw.plan(model.train_step, model.state, model.batch, cluster="1x2 h100", method=mw.DataParallel())
        said[name] = str(plan.simulate())
    assert "tokens/s" in said["gpt-tiny"]
    assert "examples/s" in said["mlp"] and "tokens" not in said["mlp"]


def test_what_differs_between_plans():
    one, other = tensor_parallel(), plan_of("gpt-tiny", (4, 2), mw.DataParallel())
    found = one.diff(other)
    moved = {m.path: m for m in found.moved}
    row = moved["state/params/layers/*/up"]
    assert (row.one.symbols, row.other.symbols, len(row.paths)) == ("D F_y", "D F", 2)
    assert not found.is_same and "data parallel ×8 over x and y" in " ".join(str(found).split())
    total = sum(s.seconds[1] - s.seconds[0] for s in found.sent)
    assert abs(total - (other.cost.communication - one.cost.communication)) < 1e-6
    assert one.diff(one).is_same and "the same shardings and cost" in str(one.diff(one))


def test_plans_of_different_functions_differ_in_what_they_have():
    one, other = plan_of("mlp", (8,), mw.DataParallel()), tensor_parallel()
    assert "not there" in str(one.diff(other))


def test_plans_for_different_problems_say_so():
    one, other = (plan_of("gpt-tiny", (4, 2), mw.DataParallel(), seq=seq) for seq in (16, 32))
    found = one.diff(other)
    assert found.problems == tuple(
        f"batch/{name} is int32[8, 16] in one and int32[8, 32] in the other" for name in ("labels", "tokens")
    )
    assert str(found).startswith("the plans are for different problems: batch/labels is int32[8, 16] in one and")
    assert one.diff(one).problems == () and "different problems" not in str(one.diff(one))


def test_nothing_is_said_of_communication_where_there_is_none():
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    text = str(mw.plan(lambda x: x @ x, x, cluster="1x8 h100"))
    (step,) = (line for line in text.splitlines() if line.startswith("step "))
    assert step.endswith("µs, all of it compute")
