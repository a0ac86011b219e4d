"""Gives every test eight virtual CPU devices and the catalogue's figures of them: set before anything imports JAX.

What `mw.cluster("local")` measures would be another number each time; tests that measure say so themselves.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["MESHWRIGHT_MEASURE"] = "never"
