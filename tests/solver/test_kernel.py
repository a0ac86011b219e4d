"""Kernels are loaded without what they do not use, and numba stays as it is for whoever else uses it."""

import subprocess
import sys

SCRIPT = """
import sys
import numba, numpy as np
import meshwright.solver.kernel
assert "numba.np.arraymath" in sys.modules
assert not any(name.startswith("scipy.linalg") for name in sys.modules), "loaded"

@numba.njit
def product(a, b):
    return np.dot(a, b)

print(product(np.eye(2), np.full((2, 2), 3.0)).sum())
import scipy.linalg, scipy.linalg.cython_blas
print(scipy.linalg.det(np.eye(3)), scipy.linalg.cython_blas.__name__)
"""


def test_blas_is_found_without_running_scipy_linalg():
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["12.0", "1.0", "scipy.linalg.cython_blas"]
