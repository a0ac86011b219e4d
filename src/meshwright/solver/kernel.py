"""The one decorator of every compiled kernel: cached on disk, and recompiled when any file of the solver changes."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba

# Infinities are legal values in every kernel (impossible pairs), NaN never occurs: so nnan, but never ninf.
_FASTMATH = {"nnan", "nsz", "contract"}


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
    """Compiles a small helper that is only ever called from other kernels."""
    return numba.njit(fastmath=_FASTMATH, nogil=True)(function)
