"""The package's door: its exact names, and an import that loads neither numba nor JAX."""

import subprocess
import sys

import meshwright.solver


def test_the_public_names_are_these():
    names = ["ChoiceProblem", "Progress", "Solution", "Status", "lower_bound", "price", "solve"]
    assert meshwright.solver.__all__ == names
    assert all(getattr(meshwright.solver, name) for name in names)


def test_importing_loads_no_numba_and_no_jax():
    code = "import sys; from meshwright.solver import *; print('numba' in sys.modules, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
