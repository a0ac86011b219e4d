"""Two processes under `mw.initialize`, of which one is killed; those of `../stages/test_processes.py` end well."""

import os
import socket
import subprocess
import sys

import pytest

import meshwright as mw
from tests.compiling import FLAGS
from tests.runtime.processes import in_crew
from tests.runtime.processes.test_rendezvous import free_address

pytestmark = pytest.mark.devices

HANG_S = 240


def run_two():
    """Exit codes and output of both processes."""
    port = free_address().rpartition(":")[2]
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {FLAGS}"}
    children = [
        subprocess.Popen(
            [sys.executable, in_crew.__file__, str(process), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for process in range(2)
    ]
    try:
        said = [child.communicate(timeout=HANG_S) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    return [child.returncode for child in children], said


def losses(output):
    return [float(line.split()[1]) for line in output.splitlines() if line.startswith("loss")]


def test_a_process_that_is_killed_ends_the_other_in_one_sentence():
    codes, [first, second] = run_two()
    assert codes == [1, -9], first[1]
    assert losses(first[0]) == losses(second[0]) == [0.0, -2.0]
    last = first[1].strip().splitlines()[-1]
    assert last.startswith("meshwright: process 1 was killed or crashed") and "stack trace" not in first[1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"timeout": 0}, "timeout is 0 and heartbeat 10.0; give seconds"),
        ({"heartbeat": 0.1}, "heartbeat 0.1; give seconds"),
        ({"process_id": 2}, "num_processes 2 and process_id 2; give the host and port of process 0"),
        ({"coordinator_address": None}, "coordinator_address is None"),
    ],
)
def test_what_cannot_be_is_refused(monkeypatch, given, said):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    usual = {"coordinator_address": "127.0.0.1:1", "num_processes": 2, "process_id": 0}
    with pytest.raises(mw.ProcessError, match=said):
        mw.initialize(**usual | given, cluster_detection_method="deactivate")


def test_a_single_process_whose_port_is_in_use_is_told_so():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(mw.ProcessError, match=f"cannot listen at port {port} .* give a free port"):
            mw.initialize(f"127.0.0.1:{port}", 1, 0)


def test_numbers_from_the_environment_that_are_none_are_refused(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "first")
    with pytest.raises(
        mw.ProcessError, match="the environment variable JAX_PROCESS_ID is 'first'; give a whole number"
    ):
        mw.initialize("127.0.0.1:1")
