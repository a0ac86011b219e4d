"""Gives every test eight virtual CPU devices and the catalogue's figures of them: set before anything imports JAX.

Programs are compiled without optimising their machine code: they run once or twice. What `mw.cluster("local")` measures
would be another number each time; tests that measure say so themselves. A model that fails is an error here.
The cyclic garbage collector runs rarely: traces and plans are kept for later tests, and it would scan them repeatedly.
A test that leaves the process in another state than it found it in fails, since the tests after it would depend on it.
"""

import gc
import logging
import os
import signal
import sys
import time
from collections import defaultdict

import hypothesis
import pytest

from meshwright import jit
from tests.compiling import FLAGS

devices = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices} {FLAGS}".strip()
os.environ["MESHWRIGHT_MEASURE"] = "never"
os.environ["MESHWRIGHT_STRICT"] = "1"
os.environ["MESHWRIGHT_PROGRESS"] = "0"
os.environ["MESHWRIGHT_COMPILE_BESIDE"] = "0"
jit.now = time.process_time  # what a search finds within its seconds does not depend on what else the machine does
gc.set_threshold(100_000, 10, 10)
# A busy machine is no mistake of the code: neither an example nor the drawing of all has a time limit.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-machine")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has the commands it runs with `&` ignore interrupts


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items):
    """Leaves cases of sweeps to `make nightly`: of a test that is marked `sweep(n)`, n are taken, spread evenly."""
    sweeps = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep"):
            sweeps[item.nodeid.partition("[")[0]].append(item)
    for cases in sweeps.values():
        taken = cases[0].get_closest_marker("sweep").args[0]
        sample = {len(cases) * (2 * number + 1) // (2 * taken) for number in range(taken)}
        for number, case in enumerate(cases):
            if number not in sample and len(cases) > taken:
                case.add_marker(pytest.mark.nightly)


@pytest.fixture(autouse=True)
def process_state():
    """Fails a test that does not restore what it changed for the whole process."""
    before = _process_state()
    yield
    after = _process_state()
    changed = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    assert not changed, f"the test changed and did not restore {', '.join(changed)}"


def _process_state() -> dict[str, object]:
    settings = ("JAX_", "MESHWRIGHT_", "NUMBA_", "XLA_")  # other libraries set variables of their own when imported
    found: dict[str, object] = {f"${name}": os.environ[name] for name in os.environ if name.startswith(settings)}
    logger = logging.getLogger("meshwright")
    found["the level of the logger"] = logger.level
    found["whether the logger propagates"] = logger.propagate
    found["the working directory"] = os.getcwd()
    for name, default in (("jax_enable_x64", False), ("jax_default_matmul_precision", None)):
        found[name] = getattr(sys.modules["jax"].config, name) if "jax" in sys.modules else default
    return found
