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
def _stamp() -> str:
    """A digest of all files with kernels: numba looks only at a kernel's own file, so edited callees would go stale."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        text = path.read_bytes()
        if b"@kernel" in text or b"@inline" in text:
            digest.update(text)
    return digest.hexdigest()


def kernel(function: Callable) -> Any:
    """Compiles a function on first use and keeps the machine code for later processes."""
    compiled = numba.njit(cache=True, fastmath=_FASTMATH, nogil=True)(function)
    cache_file = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = _stamp()
    return compiled


def inline(function: Callable) -> Any:
    """Compiles a small helper that is only ever called from other kernels."""
    return numba.njit(fastmath=_FASTMATH, nogil=True)(function)
