"""Threads of XLA's CPU client; `program/test_compiler_faults.py` shows why programs take turns."""

import os

import jax
import pytest

from meshwright.profiler.survey import num_cpus
from meshwright.runtime.cpu_turns import add_threads

CORES = num_cpus()


@pytest.mark.parametrize(
    ("platforms", "given", "found"),
    [("cpu", None, str(CORES + 4 * 3)), ("cpu,cuda", "7", "7"), ("cuda", None, None), ("", None, None)],
)
def test_threads_are_added_for_cpus_alone_and_unless_the_user_said_how_many(monkeypatch, platforms, given, found):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert number_of_threads(monkeypatch, platforms, given, num_processes=3) == found


@pytest.mark.parametrize(("devices", "processes", "spare"), [(1, 2, 2), (2, 4, 8), (8, 64, 64), (128, 2, 128)])
def test_each_process_may_keep_a_thread_of_each_device_waiting(monkeypatch, devices, processes, spare):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={devices}")
    assert number_of_threads(monkeypatch, "cpu", None, processes) == str(CORES + spare)


def test_a_system_that_does_not_say_which_cpus_are_ours_has_all_of_them(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    monkeypatch.setenv("XLA_FLAGS", "")
    assert number_of_threads(monkeypatch, "cpu", None, num_processes=2) == "7"


def number_of_threads(monkeypatch, platforms, given, num_processes):
    monkeypatch.delenv("NPROC", raising=False)
    if given is not None:
        monkeypatch.setenv("NPROC", given)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        add_threads(num_processes)
    finally:
        jax.config.update("jax_platforms", before)
    return os.environ.pop("NPROC", None)
