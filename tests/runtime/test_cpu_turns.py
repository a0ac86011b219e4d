"""Threads of XLA's CPU client; `program/test_compiler_faults.py` shows why programs take turns."""

import os

import jax
import pytest

from meshwright.runtime.cpu_turns import add_threads


@pytest.mark.parametrize(
    ("platforms", "given", "found"), [("cpu", None, 64), ("cpu,cuda", "7", 7), ("cuda", None, None), ("", None, None)]
)
def test_threads_are_added_for_cpus_alone_and_unless_the_user_said_how_many(monkeypatch, platforms, given, found):
    monkeypatch.delenv("NPROC", raising=False)
    if given is not None:
        monkeypatch.setenv("NPROC", given)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        add_threads()
    finally:
        jax.config.update("jax_platforms", before)
    number = os.environ.pop("NPROC", None)
    assert number == (None if found is None else str(max(found, os.cpu_count()) if given is None else found))
