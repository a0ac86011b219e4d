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
from . import in_processes

SCRIPT = Path(in_processes.__file__)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of the two processes found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    directory = tmp_path_factory.mktemp("processes")
    children = []
    for process in range(2):
        log = (directory / f"{process}.log").open("w+")
        command = [sys.executable, str(SCRIPT), str(process), str(port), str(directory)]
        children.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ), log))
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
    assert codes == [0, 0], "\n".join(f"--- process {i}: {text[-4000:]}" for i, text in enumerate([codes, *said]))
    return [json.loads(text.rpartition("RESULT ")[2].splitlines()[0]) for text in said]


def test_a_state_born_in_parts_trains_as_in_one_process(results, tmp_path):
    one = in_processes.train_a_created_state(tmp_path)
    for found, _, _ in results:
        np.testing.assert_allclose(found["losses"], one["losses"], rtol=2e-5)
        assert found["plans"] == one["plans"] == 1


def test_a_state_from_the_host_trains_as_in_one_process(results, tmp_path):
    one = in_processes.train_a_state_from_the_host(tmp_path)
    for _, found, _ in results:
        np.testing.assert_allclose(found["numbers"], one["numbers"], rtol=2e-5, atol=1e-6)
        assert found["n"] == one["n"] == 4
        assert found["plans"] == one["plans"] == 1, "restoring needs no new plan, the smaller batch one"


def test_all_processes_follow_the_plan_of_the_first(results):
    assert [found["method"] for _, _, found in results] == ["Zero-1", "Zero-1"]


def test_what_would_make_processes_wait_for_each_other_is_an_error_in_all(results):
    first, second = (found for _, _, found in results)
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
