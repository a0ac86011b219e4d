"""The one decorator of every compiled kernel: cached on disk, and recompiled when any file of the solver changes."""

import hashlib
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import scipy

# Infinities are legal values in every kernel (impossible pairs), NaN never occurs: so nnan, but never ninf.
_FASTMATH = {"nnan", "nsz", "contract"}

# Where an array is read in an inner loop: an unsigned place never counts from the end. Loops over such places, with a
# plain choice of the lesser number rather than `min`, are the ones that are compiled to vectors; slices would be too,
# but cost more than they gain where nodes have few states.
place = np.uint64


def _find_blas() -> None:
    """Lets numba find BLAS without running scipy.linalg, which takes 0.2 s and which no kernel here uses.

    Before its first kernel numba imports one extension of that package, to see whether it is there. A bare package
    stands in for it meanwhile and is gone afterwards: whoever imports scipy.linalg later gets the real one.
    """
    package = "scipy.linalg"
    if package in sys.modules or threading.active_count() > 1:  # another thread might be about to import it
        return
    stand_in = ModuleType(package)
    stand_in.__path__ = [str(Path(scipy.__path__[0], "linalg"))]
    sys.modules[package] = stand_in
    try:
        import numba.np.arraymath  # noqa: F401
    finally:
        del sys.modules[package]
        sys.modules.pop(f"{package}.cython_blas", None)


_find_blas()


@cache
def _stamp(folder: Path) -> str:
    """A digest of all kernels that a kernel may call: numba looks only at its own file, so edited callees go stale.

    Kernels call only kernels of their own folder.
    """
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(folder.glob("*.py")):
        text = path.read_bytes()
        if b"@kernel" in text or b"@inline" in text:
            digest.update(text)
    return digest.hexdigest()


def kernel(function: Callable) -> Any:
    """Compiles a function on first use and keeps the machine code for later processes."""
    compiled = numba.njit(cache=True, fastmath=_FASTMATH, nogil=True)(function)
    cache_file: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = _stamp(Path(function.__code__.co_filename).parent)
    return compiled


def inline(function: Callable) -> Any:
    """Compiles a small helper that is only ever called from other kernels, as part of each of them.

    Left to be inlined later, references to its arrays are counted at every call: a third of the time of short sweeps.
    """
    return numba.njit(fastmath=_FASTMATH, nogil=True, inline="always")(function)
