"""Scratch folders go with their process, or with the next one that looks; those of a living process stay."""

import signal
import subprocess
import sys
from pathlib import Path

from meshwright.scratch import scratch_folder

OWNER = """
import sys
from meshwright.scratch import scratch_folder
with scratch_folder("test", sys.argv[1]) as folder:
    (folder / "file").write_text("kept")
    print(folder, flush=True)
    sys.stdin.readline()
"""


def owner(root):
    """A process with a folder, and the folder."""
    command = [sys.executable, "-c", OWNER, str(root)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def test_a_folder_goes_with_its_process_or_with_the_next_one(tmp_path):
    process, folder = owner(tmp_path)
    with scratch_folder("test", tmp_path) as other:
        assert other != folder and sorted(tmp_path.iterdir()) == sorted([other, folder])  # its owner lives
    assert list(tmp_path.iterdir()) == [folder]
    process.communicate("end\n")
    assert not folder.exists()


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path):
    process, folder = owner(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (folder / "file").read_text() == "kept"
    with scratch_folder("elsewhere", tmp_path):
        assert folder.exists()  # of another purpose
    with scratch_folder("test", tmp_path):
        assert not folder.exists()


def test_a_folder_goes_when_its_block_is_left_by_an_error(tmp_path):
    try:
        with scratch_folder("test", tmp_path) as folder:
            raise KeyError("no such metric")
    except KeyError:
        assert not folder.exists()
