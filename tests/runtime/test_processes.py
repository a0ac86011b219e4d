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
from tests.compiling import FLAGS

from . import in_processes

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

    one = in_processes.train_a_state_from_the_host(tmp_path / "other")
    for found in (first["host"], second["host"]):
        np.testing.assert_allclose(found["numbers"], one["numbers"], rtol=2e-5, atol=1e-6)
        assert found["n"] == one["n"] == 4
        assert found["plans"] == one["plans"] == 1, "restoring needs no new plan, the smaller batch one"

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
    assert "start a process on each of them, which calls jax.distributed.initialize()" in said
