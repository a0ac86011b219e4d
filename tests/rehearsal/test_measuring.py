"""Candidates are measured once: what was measured stays, failures are kept, hopeless candidates are abandoned."""

import sqlite3
import threading
import time
from types import SimpleNamespace

import jax
import pytest

import meshwright as mw
from meshwright.profiler.measurements import open_database
from meshwright.rehearsal import measuring
from meshwright.rehearsal.measuring import Candidate, Measuring
from meshwright.rehearsal.parts import parts_of
from meshwright.rehearsal.share.part_program import PartProgram
from tests.rehearsal.share.test_program import step, weights

pytestmark = pytest.mark.devices


@pytest.fixture(scope="module")
def candidates():
    args = jax.eval_shape(weights), jax.ShapeDtypeStruct((64, 16), "float32")
    plan = mw.plan(step, *args, cluster="local", mesh=(8,), method="zero3")
    return [Candidate(plan, plan.origin, part) for part in parts_of(plan, plan.origin.graph)]


@pytest.fixture
def database(tmp_path):
    with open_database(tmp_path / "measurements.sqlite") as found:
        yield found


def test_what_was_measured_is_not_measured_again(candidates, database):
    said = []
    first = Measuring(jax.devices()[0], database, seconds=100, say=said.append)
    found = first.measure(candidates)
    assert first.num_measured == len(found) == len(candidates) == len(database) == len(said)
    assert said[0].startswith("measuring 1 of 2: ") and said[0].endswith(" s left")
    assert all(m.seconds > 0 and m.memory_bytes > 0 and m.kind == "rehearsed" for m in found.values())
    assert all(key.chip == "cpu" and key.link == "" and key.dtype == "float32" for key in found)
    second = Measuring(jax.devices()[0], database)
    assert second.measure(candidates) == found and second.num_measured == 0


def test_what_fails_is_kept_with_its_reason(candidates, database):
    first = Measuring(jax.devices()[0], database, limit_bytes=10)
    found = first.measure(candidates)
    assert all(m.seconds is None and "10 B are allowed" in m.failure for m in found.values())
    assert len(first.remarks) == len(candidates) and "could not be measured" in first.remarks[0]
    second = Measuring(jax.devices()[0], database, limit_bytes=10)
    assert second.measure(candidates) == found and second.num_measured == 0
    roomy = Measuring(jax.devices()[0], database)
    assert all(m.seconds for m in roomy.measure(candidates).values()) and roomy.num_measured == len(candidates)


def test_a_split_that_fails_in_any_way_leaves_the_others(candidates, database, monkeypatch):
    broken, whole = candidates[0], Candidate.compile

    def compile_some(self, *args):
        if self is broken:
            raise KeyError("no kernel for this split")
        return whole(self, *args)

    monkeypatch.setattr(Candidate, "compile", compile_some)
    found = Measuring(jax.devices()[0], database).measure(candidates)
    reasons = [m.failure for m in found.values()]
    assert len(found) == len(candidates) and sorted(reasons)[-1] == "'no kernel for this split'" and "" in reasons


def test_a_full_disk_costs_only_the_record(candidates, database, caplog, monkeypatch):
    def full(_):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(database, "put_all", full)
    found = Measuring(jax.devices()[0], database).measure(candidates)
    assert all(m.seconds for m in found.values()) and len(database) == 0
    assert "database or disk is full" in caplog.text


def test_an_interrupt_loses_nothing(candidates, database):
    def say(text):
        if text.startswith("measuring 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Measuring(jax.devices()[0], database, say=say).measure(candidates)
    assert len(database) == 1


def test_nothing_is_measured_once_time_is_over(candidates, database):
    late = Measuring(jax.devices()[0], database, seconds=1e-9)
    assert late.is_over and late.measure(candidates) == {} and len(database) == 0


def test_a_program_that_does_not_compile_in_time_is_not_waited_for(candidates, database, monkeypatch):
    stuck, compiled, go_on = candidates[0], candidates[1].compile(jax.devices()[0]), threading.Event()

    def compile_some(self, *args):
        return compiled if self is not stuck or not go_on.wait() else None

    def end(_):
        late.deadline = time.perf_counter()

    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() / 1000)  # the time ends when the other one is measured
    monkeypatch.setattr(Candidate, "compile", compile_some)
    late = Measuring(jax.devices()[0], database, seconds=1, say=end)
    found = late.measure(candidates)
    go_on.set()
    assert late.is_over and stuck.key(late.device) not in found and len(found) == len(candidates) - 1
    assert all(m.seconds > 0 for m in found.values()) and len(database) == len(found)


def test_a_program_that_was_late_is_there_when_it_is_asked_for_again(candidates, database, monkeypatch):
    compiled, begun, go_on = candidates[0].compile(jax.devices()[0]), [], threading.Event()

    def compile_late(self, *args):
        begun.append(self)
        go_on.wait()
        return compiled

    monkeypatch.setattr(Candidate, "compile", compile_late)
    found = Measuring(jax.devices()[0], database, seconds=0.1)
    assert found.measure(candidates[:1]) == {}
    go_on.set()
    found.deadline = None
    assert len(found.measure(candidates[:1])) == len(begun) == 1


def test_rounds_of_whole_steps_are_longer(database, monkeypatch):
    counted = []

    class Slow(PartProgram):
        def run(self):
            counted.append(1)

    monkeypatch.setattr(time, "perf_counter", lambda: 0.01 * len(counted))
    found = Measuring(jax.devices()[0], database)
    found._time(Slow(None, list), best_s=1e-9)
    part = len(counted)
    found._time(Slow(None, list), best_s=1e-9, is_step=True)
    assert len(counted) - part > 2 * part


class Started(PartProgram):
    """A program of which starting a run takes some time, and which is done some time after the last was started."""

    now, left_s = 0.0, 0.0

    def run(self):
        self.now += 0.001
        return self

    def block_until_ready(self):
        self.now += self.left_s
        return self


def test_a_part_is_short_if_the_host_sets_the_pace(monkeypatch):
    program = Started(None, list)
    monkeypatch.setattr(time, "perf_counter", lambda: program.now)
    assert measuring.is_short(program, 10)
    program.left_s = 0.05
    assert not measuring.is_short(program, 10)


def test_a_short_part_is_timed_in_a_loop_on_accelerators(candidates, database, monkeypatch):
    laps, whole = [], Candidate.compile

    def compile_some(self, device, limit_bytes, count):
        laps.append(count)
        return whole(self, device, limit_bytes, count)

    monkeypatch.setattr(Candidate, "compile", compile_some)
    monkeypatch.setattr(measuring, "is_short", lambda program, runs: True)
    on_cpus = Measuring(jax.devices()[0], database)
    assert len(on_cpus.measure(candidates)) == len(candidates) and set(laps) == {1}
    accelerator = SimpleNamespace(platform="gpu", device_kind="cpu")
    monkeypatch.setattr(Measuring, "_compile", lambda self, key, c, n: c.compile(jax.devices()[0], None, n))
    monkeypatch.setattr(measuring, "reference_program", lambda _: candidates[0].compile(jax.devices()[0], None, 1))
    looping = Measuring(jax.devices()[0], database, fresh=True)
    looping.device = accelerator
    laps.clear()
    found = looping.measure(candidates)
    assert all(m.seconds > 0 for m in found.values())
    assert laps.count(measuring.MOST_RUNS) == len(candidates) == len(found)


def test_hopeless_candidates_are_abandoned_after_a_round(database):
    counted = []

    class Slow(PartProgram):
        def run(self):
            counted.append(1)
            time.sleep(0.03)

    found = Measuring(jax.devices()[0], database)
    assert found._time(Slow(None, list), best_s=0.001) >= 0.03
    hopeless = len(counted)
    assert found._time(Slow(None, list), best_s=float("inf")) >= 0.03
    assert hopeless == 2 + measuring.LEAST_RUNS
    assert len(counted) - hopeless >= 2 + measuring.ROUNDS * measuring.LEAST_RUNS
