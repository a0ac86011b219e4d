"""Profilers of one machine take turns."""

import subprocess
import sys

from meshwright.profiler.measurements.turn import my_turn

HOLDER = """
import sys
from meshwright.profiler.measurements.turn import my_turn
with my_turn(lambda text: None):
    print("mine", flush=True)
    sys.stdin.readline()
"""


def test_a_second_profiler_says_that_it_waits(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    other = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "mine\n"
    said = []

    def say(text):
        said.append(text)
        other.stdin.write("\n")
        other.stdin.flush()

    with my_turn(say):
        assert said == ["another profiler is measuring on this machine: waiting for it"]
    assert other.wait(60) == 0
    other.stdin.close()
    other.stdout.close()
    with my_turn(said.append):
        assert len(said) == 1


def test_without_a_folder_nobody_waits(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "file"))
    with my_turn(lambda text: None):
        pass
