"""Two processes of four devices: the numbers of one process of eight, and errors instead of waiting for ever."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.runtime.processes import peers
from tests.compiling import FLAGS
from tests.runtime.processes import in_processes

pytestmark = pytest.mark.devices

SCRIPT = Path(in_processes.__file__)


def run_two(directory):
    """What each of two processes finds: see `in_processes.py`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {FLAGS}"}
    children = []
    for process in range(2):
        log = (directory / f"{process}.log").open("w+")
        command = [sys.executable, str(SCRIPT), str(process), str(port), str(directory)]
        children.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment), log))
    try:
        codes = [child.wait(timeout=240) for child, _ in children]
    except subprocess.TimeoutExpired:
        codes = ["still running after 240 s"]
    finally:
        for child, _ in children:
            child.kill()
            child.wait()
    said = []
    for _, log in children:
        log.seek(0)
        said.append(log.read())
        log.close()
    logs = "\n".join(f"--- process {i}:\n{text[-4000:]}" for i, text in enumerate(said))
    assert codes == [0, 0], f"exit codes {codes}\n{logs}"
    return [json.loads(text.rpartition("RESULT ")[2].splitlines()[0]) for text in said]


def test_two_processes_do_as_one_does(tmp_path):
    """One test, since starting the processes is what takes its time."""
    first, second = run_two(tmp_path)
    one = in_processes.train_a_created_state(tmp_path / "one")
    for found in (first["created"], second["created"]):
        np.testing.assert_allclose(found["losses"], one["losses"], rtol=2e-5)
        assert found["plans"] == one["plans"] == 1
        assert found["kept"] == one["kept"] == ["2"]

    one = in_processes.train_a_state_from_the_host(tmp_path / "other")
    for found in (first["host"], second["host"]):
        np.testing.assert_allclose(found["numbers"], one["numbers"], rtol=2e-5, atol=1e-6)
        assert found["n"] == one["n"] == 4
        assert found["plans"] == one["plans"] == 1, "restoring needs no new plan, the smaller batch one"

    for found in (first["failed_save"], second["failed_save"]):
        assert "step 2 could not be saved" in found["told"] and "step 1 there is intact" in found["told"]
        assert found["steps"] == [1, 3], "all were told, and could save again"
    assert "process 1 could not do its part" in first["failed_save"]["told"]
    assert first["failed_save"]["left"] == ["1"], "what was written of step 2 is removed"

    for kind, (words, count) in {
        "fewer": ("process 1 has no more batches after 3, and process 0 has more", 3),
        "more": ("process 0 has no more batches after 3, and process 1 has more", 3),
        "parts": ("batch 4 has its array as float32[3, 2] in process 1 and as float32[4, 2] in process 0", 3),
        "loader": ("the batches of process 1 ended in OSError: no such file, after 3 of them", 3),
        "first": ("the batches of process 0 ended in OSError: no such file, after 3 of them", 3),
        "well": ("nothing was refused", 4),
    }.items():
        for process, found in enumerate((first["disagreements"][kind], second["disagreements"][kind])):
            own = process == {"loader": 1, "first": 0}.get(kind)
            assert found[1] == count, f"{kind}: the batches before it are computed with"
            assert (found[0] == "OSError: no such file") if own else (words in found[0])

    ours, theirs = first["measured"], second["measured"]
    assert ours["first"] == ours["again"] == theirs["first"] == theirs["again"]
    assert {t["size"] for t in ours["first"]["inter"]["timings"]} == {2, 8}
    assert {t["size"] for t in ours["first"]["intra"]["timings"]} == {2, 4}
    assert ours["costs"] == theirs["costs"] and ours["costs"].startswith("measured on")
    assert ours["files"] == theirs["files"] == ["0"], "the first process keeps the file"
    assert "not all 2 processes asked for cluster 'local' within 1 s" in ours["alone"]

    first, second = first["refusals"], second["refusals"]
    assert first["method"] == second["method"] == "Zero-1", "both asked for another and follow the first"
    assert "ShardingError: process 1 calls step with other types than process 0" in first["types"]
    assert "x as float32[8, 8] in process 1 and as float32[16, 8] in process 0" in second["types"]
    for found in (first, second):
        assert "mw.batches" in found["types"]
        assert "ShardingError: the processes call the function with different values" in found["values"]
        assert "ShardingError: the batch has 3 rows" in found["fails"]
        assert "4 devices and there are 8, in 2 processes: process 1 would have none" in found["fewer"]
        assert "16 devices and there are 8, in 2 processes; its cluster has 4 hosts of 4" in found["more"]


def test_too_few_processes_are_said_to_be():
    step = mw.parallelize(lambda w, x: (w, x @ w), cluster="4x4 cpu")
    types = [jax.ShapeDtypeStruct((16, 16), "float32")] * 2
    with pytest.raises(mw.ClusterError) as caught:
        step.lower(*types)
    said = str(caught.value)
    assert "the plan is for 16 devices and there are 8, in 1 process; its cluster has 4 hosts of 4" in said
    assert "start a process on each of them, which calls mw.initialize()" in said


def test_peers_are_told_of_every_call_that_is_not_like_the_last(monkeypatch):
    ours, theirs = socket.socketpair()
    crew = peers.Peers(0, {1: ours}, heartbeat_s=10)
    monkeypatch.setattr(peers, "current", crew)

    def evaluation(w, x):
        return x.sum() + w

    def train_step(w, x):
        return w + 1, x.sum()

    step = mw.parallelize(train_step, cluster="1x2 cpu")
    evaluate = mw.follow(evaluation, step)
    w, eight, six = np.float32(0), np.ones(8, np.float32), np.ones(6, np.float32)
    for function, x in ((step, eight), (step, eight), (step, eight), (evaluate, eight), (step, eight), (step, six)):
        made = function(w, x)
        w = made[0] if function is step else w
    step.plan(w, six)  # is there: nobody has to know
    crew.fail("process 1 was interrupted")
    with pytest.raises(mw.ProcessError, match="process 1 was interrupted"):
        step(w, six)
    told = [json.loads(line) for line in theirs.recv(2**16).splitlines()]
    types = {"w": "float32[]", "x": "float32[8]"}
    turns = [
        [1, "train_step", types],
        [2, "the planning of train_step", types],
        [4, "evaluation", types],
        [5, "the planning of evaluation", types],
        [5, 0],
        [6, "train_step", types | {"x": "float32[6]"}],
        [7, "the planning of train_step", types | {"x": "float32[6]"}],
    ]
    assert told == [*({"turn": turn} for turn in turns), {"failed": ["process 1 was interrupted", False]}]
    for connection in (ours, theirs):
        connection.close()
