"""Arrays between two processes, by each transport: equal to the byte, and an error instead of waiting for ever."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiling import FLAGS

pytestmark = pytest.mark.devices

SCRIPT = Path(__file__).parent / "in_processes.py"
HANG_S = 240


@pytest.fixture(scope="module")
def logs():
    """What each of the two processes prints; starting them is what takes the time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(SCRIPT.parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = f"--xla_force_host_platform_device_count=4 {FLAGS}"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": paths}
    children = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(process), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for process in range(2)
    ]
    try:
        return [child.communicate(timeout=HANG_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


def read(log, mark):
    assert f"{mark} " in log, log[-4000:]
    return json.loads(log.partition(f"{mark} ")[2].splitlines()[0])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("transport", ["pulls", "permutes"])
def test_random_pairs_across_processes_are_equal_to_the_byte(logs, transport):
    for log in logs:
        found = read(log, "RESULT")[transport]
        assert found["num"] >= 6 and found["wrong"] == []


def test_microbatches_go_to_another_stage_and_back(logs):
    first, second = (read(log, "RESULT")["stages"] for log in logs)
    assert first["equal"] and second["equal"]
    assert (first["shards"], second["shards"]) == ([0, 4], [4, 0]), "a process has only the shards of its devices"
    assert first["crossed"] == second["crossed"] == first["size"], "two replicas need it, and it crosses once"


def test_a_sender_serves_others_while_it_waits_in_a_program(logs):
    assert all(read(log, "RESULT")["ahead"] for log in logs)


def test_an_array_may_be_deleted_once_it_was_sent(logs):
    assert all(all(read(log, "RESULT")["deleted"].values()) for log in logs)


def test_keys_and_arrays_without_elements_cross(logs):
    first, second = (read(log, "RESULT")["others"] for log in logs)
    assert first["keys"] == [] and "".join(second["keys"]) == bytes_of_range(16)
    assert first["dtype"] == second["dtype"] == "key<fry>"
    assert (first["empty"], second["empty"]) == ([[4, 0], []], [[4, 0], [[1, 0]] * 4])
    assert first["value"] and second["value"]


def bytes_of_range(count):
    return b"".join(i.to_bytes(4, "little") for i in range(count)).hex()


def test_a_process_that_is_silent_or_killed_is_named(logs):
    found = read(logs[0], "LOSSES")
    assert found["silent"][0].startswith(
        "process 1 sent nothing to process 0 for 1 s; all processes must move the same"
    )
    for name in ("killed", "gone", "never met"):
        said, seconds = found[name]
        assert said.startswith("process 1 ended or failed before it had sent an array")
        assert seconds < 120, f"{name}: noticed after {seconds} s, perhaps by its timeout of 240 s"
