"""Files are written whole or not at all, and what stands in the way is said."""

import os

import pytest

import meshwright as mw
from meshwright.output import write_whole


@pytest.mark.parametrize(
    ("name", "message"),
    [(".", "it is a folder; name a file in it"), ("none/a.json", "there is no folder .*none; make it first")],
)
def test_what_cannot_be_written_is_said(tmp_path, name, message):
    with pytest.raises(mw.OutputError, match=f"cannot write .*: {message}"):
        write_whole(tmp_path / name, "text")
    assert not list(tmp_path.iterdir()) and not tmp_path.with_name(tmp_path.name + ".part").exists()


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "first")
    (tmp_path / "a.json.part").mkdir()  # so that nothing can be written there
    with pytest.raises(mw.OutputError, match="Is a directory; choose another place"):
        write_whole(path, "second")
    assert path.read_text() == "first"


def test_a_pipe_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text")
    assert os.read(reader, 9) == b"text" and pipe.is_fifo()
    os.close(reader)
