"""Another process compiles kernels meanwhile: one at most, each kernel by one process, and none is left behind."""

import subprocess
import sys

import pytest

from meshwright import scratch
from meshwright.jit import beside

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def started(monkeypatch):
    """What is started, with a process that does nothing in the place of the one that compiles."""
    commands: list[list[str]] = []
    popen = subprocess.Popen

    def start(command, **options):
        commands.append([*command, options["env"][beside._SWITCH]])
        return popen(SLEEP)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(beside, "_started", [])
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setenv(beside._SWITCH, "1")
    yield commands
    beside._stop()


def test_one_process_is_started_and_ends_with_this_one(started):
    beside.start()
    beside.start()
    assert started == [[sys.executable, "-m", "meshwright.warm", "--beside", "0"]]
    (process,) = beside._started
    assert process.poll() is None
    beside._stop()
    assert process.poll() is not None


def test_none_is_started_where_it_is_not_wanted_or_there_is_one_core(started, monkeypatch):
    monkeypatch.setenv(beside._SWITCH, "0")
    beside.start()
    monkeypatch.setenv(beside._SWITCH, "1")
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    beside.start()
    assert started == []


def test_a_kernel_is_compiled_by_one_process_at_a_time(tmp_path):
    path = tmp_path / "kernel.lock"
    with scratch.claimed(path) as mine:
        assert mine
        with scratch.claimed(path, patient=False) as theirs:
            assert not theirs
    with scratch.claimed(path, patient=False) as theirs:
        assert theirs
    with scratch.claimed(tmp_path / "gone" / "kernel.lock") as mine:
        assert mine


def test_the_compiler_says_what_it_does_instead_of_doing_it():
    told = subprocess.run([sys.executable, "-m", "meshwright.warm", "--help"], capture_output=True, text=True)
    assert told.returncode == 0 and "Compiles every kernel" in told.stdout and "kernels ready" not in told.stdout
    wrong = subprocess.run([sys.executable, "-m", "meshwright.warm", "all"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "unrecognized arguments: all" in wrong.stderr
