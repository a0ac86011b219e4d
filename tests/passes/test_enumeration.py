"""Enumeration of a segment's combinations: all are measured, and predictors are judged by ranks and regret."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.blocks import find_blocks
from meshwright.passes.enumeration import CombinationRow, Enumeration, enumerate_segment, rank_correlation, write_page
from meshwright.profiler.measurements import open_database
from meshwright.rehearsal.combinations import choices_of


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def loss(weights, x):
    return jnp.mean(jnp.square(jax.nn.relu(x @ weights["up"]) @ weights["down"]))


ARGS = {"up": array(64, 128), "down": array(128, 64)}, array(32, 64)


def found(*rows):
    made = tuple(CombinationRow(str(n), *row, 1) for n, row in enumerate(rows))
    return Enumeration("model", 0, "f00d", "3", "8 × cpu", "whole", made, len(made), (), 1.0)


def test_ranks_and_regret_are_of_the_kernel_time():
    # Bytes, price, profile, kernel time.
    one = found((1, 4.0, 1.1, 1.0), (0, 2.0, 2.1, 2.0), (9, 1.0, 2.9, 4.0))
    assert one.correlation("profile_s") == pytest.approx(1.0)
    assert one.correlation("price_s") == pytest.approx(-1.0)
    assert one.correlation("sent_bytes") == pytest.approx(0.5)
    assert [one.regret(name) for name in ("profile_s", "sent_bytes", "price_s")] == [0.0, 1.0, 3.0]


def test_combinations_that_a_predictor_holds_equal_are_chosen_from_at_random():
    one = found((0, 1.0, 1.0, 1.0), (0, 1.0, 1.0, 3.0))
    assert one.regret("sent_bytes") == pytest.approx(1.0)
    assert math.isnan(one.correlation("sent_bytes"))
    assert rank_correlation([1, 1, 2], [3, 3, 5]) == pytest.approx(1.0)


def test_samples_of_combinations_are_fixed_and_distinct():
    blocks = find_blocks(loss, *ARGS)
    segment = blocks.segments[0]
    assert choices_of(blocks, segment) == [("rows",), ("columns",), ("contracted",)]
    some = choices_of(blocks, segment, 2)
    assert len(set(some)) == 2 and some == choices_of(blocks, segment, 2)


@pytest.mark.devices
def test_every_combination_is_measured_and_kept(tmp_path):
    with open_database(tmp_path / "some.sqlite") as database:
        one = enumerate_segment(
            jax.value_and_grad(loss), *ARGS, segment=0, cluster=mw.cluster("local"), database=database, model="two"
        )
        kept = database.rows()
    assert {row.choices for row in one.rows} == {"rows", "columns", "contracted"}
    assert len(kept) == 3 and {m.kind for m in kept} == {"whole"}
    assert all(row.kernel_s > 0 and row.price_s > 0 and row.memory_bytes > 0 for row in one.rows)
    assert len({row.sent_bytes for row in one.rows}) > 1
    text = str(one)
    assert "3 of 3 combinations measured (whole) on 8 × cpu" in text and "rank correlation" in text
    write_page(one, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "{{data}}" not in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    start = page.index('id="data">') + len('id="data">')
    assert len(json.loads(page[start : page.index("</script>", start)])["rows"]) == 3


@pytest.mark.devices
def test_an_interrupt_leaves_the_rounds_until_then(tmp_path):
    def say(text):
        if text.startswith("timing kernel times: round 2"):
            raise KeyboardInterrupt

    with open_database(tmp_path / "some.sqlite") as database:
        one = enumerate_segment(loss, *ARGS, segment=0, cluster=mw.cluster("local"), database=database, say=say)
        assert len(database) == len(one.rows) > 1 == one.num_rounds
    assert "it was interrupted after 1 of 5 rounds" in " ".join(str(one).split())


def test_bad_segments_and_single_devices_are_refused(tmp_path):
    with open_database(tmp_path / "some.sqlite") as database:
        with pytest.raises(mw.ShardingError, match="the program has segments 0 to 1"):
            enumerate_segment(loss, *ARGS, segment=7, cluster=mw.cluster("1x8 h100"), database=database)
        with pytest.raises(mw.ShardingError, match="there is one device"):
            enumerate_segment(loss, *ARGS, segment=0, cluster=mw.cluster("1 h100"), database=database)
