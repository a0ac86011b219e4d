"""Gives every test eight virtual CPU devices and the catalogue's figures of them: set before anything imports JAX.

Programs are compiled without optimising their machine code: they run once or twice. What `mw.cluster("local")` measures
would be another number each time; tests that measure say so themselves. A refinement that fails is an error here.
"""

import os

from tests.compiling import FLAGS

devices = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices} {FLAGS}".strip()
os.environ["MESHWRIGHT_MEASURE"] = "never"
os.environ["MESHWRIGHT_STRICT"] = "1"
os.environ["MESHWRIGHT_PROGRESS"] = "0"
os.environ["MESHWRIGHT_COMPILE_BESIDE"] = "0"
