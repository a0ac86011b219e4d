"""Ctrl-C in a step that takes its state over: the caller has the old state or the new one, never neither."""

import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.runtime.interrupts import hold
from tests.runtime.handed_back import state_that_calls

pytestmark = pytest.mark.devices

interrupted_at = []


def interrupt(steps):
    """Interrupts the call from which JAX hands the state back, at a certain number of steps."""
    if interrupted_at and steps == interrupted_at[0]:
        interrupted_at.clear()
        signal.raise_signal(signal.SIGINT)


State = state_that_calls(interrupt)


def train_step(state, x):
    if interrupted_at == ["in tracing"]:
        interrupted_at.clear()
        signal.raise_signal(signal.SIGINT)
    return State(state.steps + 1), x.sum()


@pytest.fixture(scope="module")
def step():
    return mw.parallelize(train_step, cluster="1x2 cpu")


@pytest.mark.parametrize("number", [1, 2, 3], ids=["first call", "second call", "quick call"])
def test_a_step_that_is_interrupted_hands_its_state_over_first(step, number):
    x = np.ones(2 * number, np.float32)  # planned anew
    state = State(jnp.zeros(2))
    interrupted_at.append(number)
    with pytest.raises(KeyboardInterrupt):
        for placed in mw.batches([x] * number, step):
            state, _ = step(state, placed)
        time.sleep(60)
    assert interrupted_at == [] and int(state.steps[0]) == number


def test_an_interrupt_that_waits_comes_before_the_next_step_takes_the_state(step):
    x = np.ones(4, np.float32)
    state = State(jnp.zeros(2))
    interrupted_at.append(2)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):
            state, _ = step(state, x)
    assert int(state.steps[0]) == 2, "the third one did not begin"


def test_a_step_that_is_interrupted_while_it_is_traced_leaves_its_arguments(step):
    state = State(jnp.zeros(2))
    interrupted_at.append("in tracing")
    with pytest.raises(KeyboardInterrupt):
        step(state, np.ones(10, np.float32))
    assert int(step(state, np.ones(10, np.float32))[0].steps[0]) == 1


def test_a_second_interrupt_does_not_wait_and_says_what_is_lost():
    with pytest.raises(KeyboardInterrupt, match="its state, which is lost: restore it from a checkpoint"), hold:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    with hold:  # neither waits any more
        pass


def test_a_handler_of_the_user_stays():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(True))
    try:
        with hold:
            signal.raise_signal(signal.SIGINT)
            assert seen == [True]
    finally:
        signal.signal(signal.SIGINT, before)
