"""Stalls: who stands still while others are ahead is found, and nobody whose step is long."""

import threading

import pytest

from meshwright.runtime.processes.stalls import Stalls, stacks
from tests.runtime.processes.launched import two_processes

pytestmark = pytest.mark.devices


def found(stalls, now, ended=()):
    return list(stalls.found(now, ended))


def test_a_process_that_stands_still_behind_others_is_found_once():
    stalls = Stalls(deadline_s=10)
    for process in range(3):
        stalls.note(process, (5, 6))
    assert found(stalls, 0) == found(stalls, 1000) == [], "a long step is the same in all processes"
    stalls.note(0, (6, 6))
    stalls.note(2, (6, 7))
    assert found(stalls, 1000) == found(stalls, 1009) == [], "from when the others went ahead"
    assert found(stalls, 1010) == [(0, 10), (1, 10)]
    assert found(stalls, 1020) == []
    stalls.note(0, (6, 7))
    stalls.note(1, (6, 6))
    assert found(stalls, 1021) == [] and stalls.longest_s(1025) == (1, 4)
    assert found(stalls, 1031) == [(1, 10)], "it had moved, and stands again"
    assert found(stalls, 1100, ended=[0, 2]) == [], "nobody waits for it any more"


def test_those_below_a_process_that_stands_still_are_not_named_for_it():
    """What is known of process 5 comes through process 1, which is stopped."""
    stalls = Stalls(deadline_s=10)
    for process in range(6):
        stalls.note(process, (5, 6))
    for process in (0, 2, 3, 4):
        stalls.note(process, (6, 6))
    assert found(stalls, 0) == [] and found(stalls, 10) == [(1, 10)] and stalls.longest_s(10) == (1, 10)
    stalls.note(1, (6, 6))
    assert found(stalls, 11) == [] and found(stalls, 21) == [(5, 10)]


def test_a_stack_ends_in_what_the_thread_waits_for():
    ready, done = threading.Event(), threading.Event()

    def stuck_loader():
        ready.set()
        done.wait(60)

    thread = threading.Thread(target=stuck_loader, name="meshwright-batches", daemon=True)
    thread.start()
    ready.wait(60)
    lines = stacks()
    done.set()
    at = lines.index("  meshwright-batches:")
    assert lines[0] == "  MainThread:" and "in stuck_loader: done.wait(60)" in lines[at + 1]


STUCK = """
import jax, jax.numpy as jnp, numpy as np, time
import meshwright as mw

mw.initialize()

def train_step(w, x):
    return w - jax.grad(lambda w: jnp.mean(x @ w))(w), x.max()

def loader():
    for number in range(6):
        if number == 3 and jax.process_index() == 1:
            time.sleep(4)  # the shared disk does not answer
        yield np.ones((4, 2), np.float32)

step = mw.parallelize(train_step, method=mw.DataParallel())
w = np.ones((2, 1), np.float32)
for x in mw.batches(loader(), step):
    w, _ = step(w, x)
    float(_)
print("done", flush=True)
"""


def test_a_stuck_loader_is_named_in_all_processes_with_its_line(tmp_path):
    said = two_processes(tmp_path, STUCK, "--deadline", "1")
    for process in range(2):
        assert f"[{process}] meshwright: process 1 has kept the others waiting for " in said
    assert "in loader: time.sleep(4)  # the shared disk does not answer" in said
