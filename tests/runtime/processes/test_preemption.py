"""SIGTERM: a loop learns of it once, in a process that runs alone."""

import signal
import subprocess
import sys

import pytest

import meshwright as mw
from meshwright.runtime.processes.preemption import _Watch

CODE = """
import os, sys
import meshwright as mw
for step in range(4):
    if mw.preempted():
        print("saved at", step, mw.preempted(), flush=True)
        os.kill(os.getpid(), 15)
    if step == 2:
        os.kill(os.getpid(), 15)
print("not reached")
"""


def test_a_loop_learns_of_the_first_signal_and_the_second_ends_it():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "saved at 3 True\n"), done.stderr


def test_a_handler_of_the_users_own_is_still_called():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        watch = _Watch()
        assert not watch.look()
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM] and watch.look()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_is_refused():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool, pytest.raises(mw.ProcessError, match="outside of the main thread"):
        pool.submit(_Watch().look).result()
