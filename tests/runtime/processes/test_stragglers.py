"""Stragglers: who adds to each step is found, and nobody who waits for others or is ahead of the devices."""

import pytest

from meshwright.runtime.processes.stragglers import Figures, Pace, Stragglers
from tests.runtime.processes.launched import two_processes

pytestmark = pytest.mark.devices


def paced(gap_s, *, waited_s=0.0, fetched_s=0.0, ends=True):
    """The figures of twenty calls of a tenth of a second each, with a gap after each of them."""
    pace, now = Pace(), 1.0
    for _ in range(20):
        pace.begin(now)
        if ends:
            pace.ended(now, now + 0.1)
        pace.waited(waited_s)
        pace.fetched(fetched_s)
        now += 0.1 + gap_s
    return pace.figures()


def test_what_a_process_adds_to_a_step_is_the_gap_before_it():
    assert paced(0.05) == pytest.approx((0.05, 0.15))
    assert paced(0.05, ends=False).own_s == 0, "the devices are busy: it is ahead of them"


def test_of_a_wait_for_a_batch_only_its_own_fetching_counts():
    assert paced(0.05, waited_s=0.05, fetched_s=0.001).own_s == pytest.approx(0.001), "another process's loader is slow"
    assert paced(0.05, waited_s=0.05, fetched_s=0.15).own_s == pytest.approx(0.05), "its own is, beside the step"
    assert paced(0.05, waited_s=0.0, fetched_s=0.15).own_s == pytest.approx(0.05), "it is something else"


def test_few_calls_say_nothing_and_a_pause_neither():
    pace = Pace()
    for number in range(16):
        pace.begin(1.0 + number)
        pace.ended(1.0 + number, 1.9 + number)
        assert pace.figures() is None
    pace.begin(100.0)
    assert pace.figures() == pytest.approx((0.1, 1.0))


def test_a_straggler_is_found_once_and_again_after_it_was_none():
    stragglers, usual = Stragglers(), Figures(0.01, 0.2)
    paces = {0: usual, 1: Figures(0.06, 0.2), 2: usual}
    assert [*stragglers.found(paces, ())] == [(1, pytest.approx(0.05), 0.2)]
    assert not [*stragglers.found(paces, ())]
    assert not [*stragglers.found(paces | {1: usual}, ())]
    assert [*stragglers.found(paces, ())]


def test_no_straggler_is_less_than_a_fifth_or_a_pause_of_a_scheduler_or_alone():
    usual = Figures(0.0, 0.1)
    for other in (Figures(0.016, 0.1), Figures(0.004, 0.005)):
        assert not [*Stragglers().found({0: usual, 1: other}, ())]
    assert not [*Stragglers().found({0: usual, 1: Figures(0.09, 0.1)}, [0])], "nobody waits for it"


SLOW = """
import jax, jax.numpy as jnp, numpy as np, time
import meshwright as mw

mw.initialize()

def train_step(w, x):
    return w - jax.grad(lambda w: jnp.mean(x @ w))(w), x.max()

step = mw.parallelize(train_step, method=mw.DataParallel())
w = np.ones((2, 1), np.float32)
for _ in range(30):
    began = time.perf_counter()
    w, top = step(w, np.ones((4, 2), np.float32))
    float(top)
    took = time.perf_counter() - began  # on a busy machine steps take longer: a part of them is waited for in any case
    if jax.process_index() == 1:
        time.sleep(0.4 + took)  # writes pictures
print("done", flush=True)
"""


def test_a_process_that_slows_all_is_named_in_all_processes_with_its_line(tmp_path):
    said = two_processes(tmp_path, SLOW)
    for process in range(2):
        assert f"[{process}] meshwright: process 1 slows the others: they wait for it for " in said
    assert "in <module>: time.sleep(0.4 + took)  # writes pictures" in said
