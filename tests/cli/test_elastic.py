"""`meshwright launch --min --max`: hosts, which are launchers here, leave and come, and the run goes on."""

import os
import re
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from meshwright.cli.launching import leader
from meshwright.runtime.processes.connections import reserved_port
from tests.cli import in_elastic

pytestmark = pytest.mark.slow

HANG_S = 240


class Hosts:
    """Launchers of one run, by name, whose output goes to files."""

    def __init__(self, folder, *command):
        with reserved_port("127.0.0.1") as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.folder, self.command = folder, command
        self.running = {}

    def start(self, name, *options):
        command = [sys.executable, "-m", "meshwright", "launch", "--min", "2", "--max", "4", "--at", self.address]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "MESHWRIGHT_MEASURE": "never"}
        with open(self.folder / name, "w") as output:
            self.running[name] = subprocess.Popen(
                [*command, *options, *map(str, self.command)], stdout=output, stderr=output, env=environment
            )

    def lose(self, name):
        host = self.running.pop(name)
        host.kill()
        host.wait()

    def said(self, name):
        return (self.folder / name).read_text()

    def wait(self, what, is_so):
        deadline = time.monotonic() + HANG_S
        while not is_so():
            told = "\n".join(f"{name}:\n{self.said(name)}" for name in self.running)
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{told}"
            time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for host in self.running.values():
            host.kill()
            host.wait()


SCRIPT = """
import os, signal, sys, time
place = f"{os.environ['JAX_PROCESS_ID']} of {os.environ['JAX_NUM_PROCESSES']}"
print(place, flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
if place == "1 of 3":
    sys.exit(int(open(sys.argv[1]).read()))
"""


def test_processes_are_those_of_the_hosts_that_are_there(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with Hosts(tmp_path, "--grace", "0.5", tmp_path / "script.py", tmp_path / "end") as hosts:
        for name in "abcd":
            hosts.start(name)
            if name == "a":
                hosts.wait("a to lead", lambda: "leading at" in hosts.said("a"))
        hosts.wait("four", lambda: "[0] 0 of 4" in hosts.said("a"))
        hosts.lose("d")
        hosts.wait("three", lambda: "[0] 0 of 3" in hosts.said("a"))
        assert re.search(r"host \S+ left\n.*starting again with 3 processes of 3 hosts", hosts.said("a"))
        hosts.start("e")
        hosts.wait("four again", lambda: hosts.said("a").count("[0] 0 of 4") == 2)
        assert "there is room for 4 processes" in hosts.said("a")
        (tmp_path / "end").write_text("0")
        assert [host.wait(HANG_S) for host in hosts.running.values()] == [0, 0, 0, 0]


def test_the_exit_code_of_the_first_cause_is_that_of_all_hosts(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with Hosts(tmp_path, "--grace", "0.5", tmp_path / "script.py", tmp_path / "end") as hosts:
        hosts.start("a", "--processes", "2")
        hosts.wait("a to lead", lambda: "leading at" in hosts.said("a"))
        hosts.start("b", "--restarts", "7")
        hosts.wait("three", lambda: "1 of 3" in hosts.said("a"))
        (tmp_path / "end").write_text("2")  # a wrong use, which is not tried again
        assert [host.wait(HANG_S) for host in hosts.running.values()] == [2, 2]
    assert "process 1 of 3 failed with exit code 2" in hosts.said("a")
    assert "not started again, since the same error would end it again" in hosts.said("a")


def test_the_host_that_leads_is_the_last_to_hear_that_the_run_is_over(monkeypatch):
    """Its process exits then: what it has not sent yet, others would never hear."""
    heard = []
    monkeypatch.setattr(leader, "send", lambda connection, message: heard.append((connection, message)))
    run = leader.Leader(None, "127.0.0.1:1234", least=2, most=2, restarts=0, patience_s=1.0, kept="")
    for name, leads in (("b", False), ("a", True), ("c", False)):
        run._heed(leader.Host(name, name, 1, leads), {"places": 1})
    run._finish(7)
    assert heard == [("c", {"over": 7}), ("b", {"over": 7}), ("a", {"over": 7})]


def test_another_host_leads_when_the_first_one_is_lost(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with Hosts(tmp_path, "--grace", "0.5", tmp_path / "script.py", tmp_path / "end") as hosts:
        for name in "abc":
            hosts.start(name)
        hosts.wait("three", lambda: any("[0] 0 of 3" in hosts.said(name) for name in "abc"))
        lead = next(name for name in "abc" if "leading at" in hosts.said(name))
        hosts.lose(lead)
        hosts.wait("two", lambda: any("[0] 0 of 2" in hosts.said(name) for name in hosts.running))
        (tmp_path / "end").write_text("0")
        assert [host.wait(HANG_S) for host in hosts.running.values()] == [0, 0]


def test_too_few_hosts_are_said(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with Hosts(tmp_path, "--grace", "0.5", tmp_path / "script.py", tmp_path / "end") as hosts:
        hosts.start("a", "--patience", "0.5")
        assert hosts.running["a"].wait(HANG_S) == 1
    assert "2 processes are needed, and the hosts that are here have room for 1" in hosts.said("a")


@pytest.mark.devices
def test_losses_are_those_of_an_undisturbed_run_with_four_processes_then_three_then_four(tmp_path):
    def losses():
        text = (tmp_path / "losses").read_text() if (tmp_path / "losses").exists() else ""
        return [(int(n), float(loss), int(devices)) for n, loss, devices in map(str.split, text.splitlines())]

    def stepped(devices, since=0):
        rows = losses()[since:]
        return sum(row[2] == devices for row in rows) > 3 * in_elastic.EVERY

    with Hosts(tmp_path, Path(in_elastic.__file__), tmp_path) as hosts:
        for name in "abcd":
            hosts.start(name)
        hosts.wait("steps on four", lambda: stepped(4))
        hosts.lose(next(name for name in "abcd" if "leading at" not in hosts.said(name)))
        hosts.wait("steps on three", lambda: stepped(3))
        on_three = len(losses())
        hosts.start("e")
        hosts.wait("steps on four again", lambda: stepped(4, on_three))
        (tmp_path / "stop").write_text(str(losses()[-1][0] + 3))
        assert [host.wait(HANG_S) for host in hosts.running.values()] == [0, 0, 0, 0]
        said = "".join(hosts.said(name) for name in hosts.running)
    rows = losses()
    state, step, right = in_elastic.init(jax.random.key(0)), jax.jit(in_elastic.train_step), []
    for number in range(rows[-1][0]):
        state, loss = step(state, jnp.asarray(in_elastic.sample(number)))
        right.append(float(loss))
    assert {row[0] for row in rows} == set(range(1, len(right) + 1)), "no step is left out"
    assert all(abs(loss / right[number - 1] - 1) < 1e-5 for number, loss, _ in rows)
    assert [devices for devices, _ in groupby(row[2] for row in rows)] == [4, 3, 4]
    assert said.count("was read from the memory of the hosts") == 3 + 4, "every part was in two hosts' memory or more"
    again = [row[0] for row, before in zip(rows[1:], rows, strict=False) if row[0] <= before[0]]
    assert len(again) <= 1, "steps are lost with a host, and none where one comes and all save"
