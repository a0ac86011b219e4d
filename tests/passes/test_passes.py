"""The profile and search passes: what is measured is kept, known things are not measured again, plans always come."""

import time
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.blocks import blocks_of
from meshwright.graph import trace
from meshwright.passes import profile as profile_pass
from meshwright.passes.profile import profile_segments
from meshwright.passes.search import search_plan
from meshwright.profiler.measurements import open_database
from meshwright.rehearsal.combinations import some_combinations
from meshwright.rehearsal.measuring import Measuring


def step(weight, x):
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.square(jax.nn.relu(x @ w))))(weight)
    return weight - 0.1 * gradient, value


ARGS = jax.ShapeDtypeStruct((32, 64), "float32"), jax.ShapeDtypeStruct((16, 32), "float32")


@pytest.fixture
def program():
    traced = trace(step, *ARGS)
    return traced, blocks_of(traced.graph)


@pytest.fixture
def database(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    with open_database() as found:
        yield found


@pytest.mark.devices
def test_a_profile_is_kept_and_not_measured_again(program, database):
    traced, blocks = program
    mesh = mw.cluster("local").mesh((8,))
    first = profile_segments(traced, blocks, mesh, database, 300.0, lambda _: None)
    assert sorted(row.choices for row in first.rows) == ["columns", "contracted", "rows"]
    assert len(database) == 3 and first.num_known == 0
    times = [row.found.seconds for row in first.rows]
    assert times == sorted(times) and all(row.found.kind == "whole" for row in first.rows)
    again = profile_segments(traced, blocks, mesh, database, 300.0, lambda _: None)
    assert again.num_known == 3
    assert [row.found for row in again.rows] == [row.found for row in first.rows]
    text = str(again)
    assert "3 = 3" in text and "3 combinations of 1 unique segments, 3 of them known before" in text
    assert again.to_json()["rows"][0]["measurement"]["kind"] == "whole"


def test_without_the_chip_nothing_is_measured_and_the_plan_still_comes(program, database):
    traced, blocks = program
    cluster = mw.cluster("1x8 h100")
    found = profile_segments(traced, blocks, cluster.mesh((8,)), database, 10.0, lambda _: None)
    assert found.rows == () and "no device here is a h100" in str(found)
    best = search_plan(traced, blocks, cluster, (8,), 10.0)
    assert best.runs_s == () and best.plan.mesh.num_devices == 8
    assert best.step_s == best.plan.cost.total > 0
    assert "not run: its devices are not here" in str(best) and "TFLOP/s per device" in str(best)
    assert best.chosen[0].strategy in ("x: rows", "x: columns", "x: contracted", "x: -")
    assert best.to_json()["strategies"] == {0: best.chosen[0].strategy}


def test_an_interrupt_keeps_what_was_measured(program, database, monkeypatch):
    traced, blocks = program

    def interrupted(self, candidates):
        raise KeyboardInterrupt

    monkeypatch.setattr(Measuring, "measure", interrupted)
    mesh = mw.cluster("local").mesh((8,))
    found = profile_segments(traced, blocks, mesh, database, 300.0, lambda _: None)
    assert found.rows == () and "interrupted; what was measured until then is kept" in str(found)


def test_only_the_best_and_a_few_others_are_measured(program, database, monkeypatch):
    traced, blocks = program
    monkeypatch.setattr(profile_pass, "MOST_CANDIDATES", 1)
    monkeypatch.setattr(profile_pass, "EXPLORERS", 1)
    mesh = mw.cluster("1x8 h100").mesh((8,))
    planned, tried = some_combinations(traced, blocks, blocks.segments[0], mesh, 100, 100.0, lambda _: None)
    assert tried == len(planned) == 3
    chosen = profile_pass._promising(planned)
    assert len(chosen) == 2 and chosen[0].price_s <= chosen[1].price_s


@pytest.mark.devices
def test_the_plan_runs_where_its_devices_are(program, database):
    traced, blocks = program
    best = search_plan(traced, blocks, mw.cluster("local"), (8,), 60.0, steps=2)
    assert len(best.runs_s) == 3 and best.step_s == min(best.runs_s)
    assert "3 runs of 2 steps" in str(best)


def test_combinations_are_planned_only_while_there_is_time(program):
    traced, blocks = program
    mesh = mw.cluster("1x8 h100").mesh((8,))
    planned, tried = some_combinations(traced, blocks, blocks.segments[0], mesh, 100, 0.0, lambda _: None)
    assert len(planned) == tried == 1


@pytest.mark.devices
def test_a_short_time_says_what_was_left_out(program, database):
    traced, blocks = program
    found = profile_segments(traced, blocks, mw.cluster("local").mesh((8,)), database, 1e-6, lambda _: None)
    assert "Of segment 0, 1 of 3 combinations were priced in the time." in found.remarks


@pytest.mark.devices
def test_waiting_for_another_profiler_takes_none_of_the_time(program, database, monkeypatch):
    traced, blocks = program
    clock, waited = time.perf_counter, []

    @contextmanager
    def late_turn(say):
        waited.append(1000.0)
        yield

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(waited))
    monkeypatch.setattr(profile_pass, "my_turn", late_turn)
    left = []
    monkeypatch.setattr(profile_pass, "some_combinations", lambda *args: left.append(args[5]) or ([], 3))
    profile_segments(traced, blocks, mw.cluster("local").mesh((8,)), database, 600, lambda _: None)
    assert 0 < left[0] <= 300
