"""The decorators of every kernel: interpreted while that is quicker than compiling, and compiled once for all.

Compiling a kernel takes from half a second to half a minute, a small problem needs dozens of them, each for
a few milliseconds. So a kernel whose machine code is not on disk yet is interpreted: as the Python function it is, or
as a plain twin in NumPy, until it has taken as long as compiling it would. At worst that doubles the first use, at best
it saves all of it. Both give the same numbers, to the last bit: no sum is rearranged or contracted.

Machine code is kept on disk, and used from then on; it is made again when any file that holds kernels changes.
"""

import dis
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import scipy

from meshwright import beside

# Infinities are legal values in every kernel (impossible pairs), NaN never occurs: so nnan, but never ninf; and nothing
# that would round otherwise than the interpreter does.
_FASTMATH = {"nnan", "nsz"}

_COMPILE_S = 5e-3  # for each instruction of bytecode, those of its callees included: bridge, fold, sweep, settle_edge
_MOST_ELEMENTS = 4_000_000  # of arrays that an interpreted call is given: a pass over them takes about a second

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

from numba.core.registry import CPUDispatcher  # noqa: E402


class _Here(threading.local):
    """What this thread is doing.

    Attributes:
        interpreting: Whether it is inside an interpreted kernel.
        noted: Where it notes the kernels that it calls, instead of compiling them; None where it does not.
    """

    interpreting = False
    noted: "dict[str, Needed] | None" = None


class Compiling:
    """What was compiled in this process, and who wants to know.

    Attributes:
        names: Of the kernels that were compiled, with all that they call.
        seconds: How long it took to make kernels ready, those that were only loaded included.
        watchers: Called with a sentence when a kernel is about to be compiled, and with None when it is.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.seconds = 0.0
        self.watchers: list[Callable[[str | None], None]] = []
        self._busy = threading.RLock()

    @contextmanager
    def making(self, kernel: "Kernel") -> Iterator[None]:
        """Counts the time, and tells the watchers where a kernel is not merely loaded."""
        with self._busy:
            begin, fresh = time.perf_counter(), not kernel.is_kept
            if fresh:
                self.names.append(kernel.name)
                self._tell(f"compiling {kernel.name}, once on this machine: about {kernel.patience_s:.0f} s")
            try:
                yield
            finally:
                self.seconds += time.perf_counter() - begin
                if fresh:
                    self._tell(None)

    def _tell(self, what: str | None) -> None:
        for watch in list(self.watchers):
            watch(what)


compiling = Compiling()
_here = _Here()


def clock() -> float:
    """Seconds, as of `time.perf_counter`, that stand still while kernels are loaded or compiled: that is no solving."""
    return time.perf_counter() - compiling.seconds


class Kernel(CPUDispatcher):
    """A function that is interpreted until compiling it pays.

    Attributes:
        plain: What is run where it is interpreted.
        interpretable: Whether it may be.
        spent_s: For how long it was, in CPU time and with all that it called.
    """

    plain: Callable
    interpretable: bool
    spent_s = 0.0
    _kept = False
    _cache: Any

    @property
    def name(self) -> str:
        return f"{self.py_func.__module__.removeprefix('meshwright.')}.{self.py_func.__name__}"

    @property
    def is_kept(self) -> bool:
        """Whether there is machine code of it, in this process or on disk."""
        self._kept = self._kept or bool(self.overloads) or self._is_on_disk()
        return self._kept

    def _is_on_disk(self) -> bool:
        path = self.index_path
        if path is None or not path.exists():
            return False
        try:
            return bool(self._cache._cache_file._load_index())
        except Exception:  # an index of an earlier version, whose classes have moved; numba would stumble over it again
            path.unlink(missing_ok=True)
            return False

    @cached_property
    def index_path(self) -> Path | None:
        """The file that lists its machine code; None where none can be kept."""
        file: Any = getattr(self._cache, "_cache_file", None)
        return None if file is None else Path(file._index_path)

    @cached_property
    def patience_s(self) -> float:
        """About how long it takes to compile."""
        return _COMPILE_S * _num_instructions(self.py_func, set())

    def _compile_for_args(self, *args: Any, **named: Any) -> Callable:
        """What a call with arguments of new types runs; numba calls this where it has no machine code for them."""
        if _here.noted is not None and not _here.interpreting:
            needed = Needed(self, tuple(map(self.typeof_pyval, args)))
            _here.noted.setdefault(str(needed), needed)
            return self._interpret
        if _here.interpreting and (self.interpretable or _here.noted is not None):
            return self.plain
        if self.interpretable and not self.is_kept and self.spent_s < self.patience_s and _is_small(args):
            return self._interpret
        if not self.is_kept:
            beside.start()
        with compiling.making(self), beside.claimed(self.lock_path):
            return super()._compile_for_args(*args, **named)  # type: ignore[misc]

    @property
    def lock_path(self) -> Path | None:
        """A file that whoever compiles it keeps to themselves."""
        return None if self.index_path is None or self.is_kept else self.index_path.with_suffix(".lock")

    def _interpret(self, *args: Any) -> Any:
        if _here.interpreting:
            return self.plain(*args)
        begin, _here.interpreting = time.thread_time(), True
        try:
            with np.errstate(all="ignore"):  # hashes wrap around, as they do in machine code
                return _native(self.plain(*args))
        finally:
            _here.interpreting = False
            self.spent_s += time.thread_time() - begin


@dataclass(frozen=True, eq=False)
class Needed:
    """A kernel and the types of the arguments that it is called with."""

    kernel: Kernel
    types: tuple

    def __str__(self) -> str:
        return f"{self.kernel.name}{self.types}"

    def compile(self) -> None:
        """Puts its machine code on disk, unless it is there or somebody else is about to."""
        with beside.claimed(self.kernel.lock_path, patient=False) as free:
            if free:
                self.kernel.compile(self.types)


@contextmanager
def noting() -> Iterator[dict[str, Needed]]:
    """Interprets every kernel that is called meanwhile, and notes it with the types that it would be compiled for."""
    noted: dict[str, Needed] = {}
    _here.noted = noted
    try:
        yield noted
    finally:
        _here.noted = None


def kernel(
    function: Callable | None = None, *, plain: Callable | None = None, interpretable: bool = True, nan: bool = False
) -> Any:
    """Makes a kernel of a function.

    Args:
        function: Loops over arrays.
        plain: The same in NumPy, for where loops are interpreted.
        interpretable: Whether it may be interpreted: not where it draws random numbers, or where the work it does hangs
            on other things than the size of its arguments.
        nan: Whether NaN may occur.
    """
    if function is None:
        return lambda function: kernel(function, plain=plain, interpretable=interpretable, nan=nan)
    if _disabled():
        return plain or function
    options = {"nopython": True, "boundscheck": None, "fastmath": not nan and _FASTMATH, "nogil": True}
    made = Kernel(function, {}, options)
    made.plain, made.interpretable = plain or function, interpretable
    made.enable_caching()
    cache_file: Any = getattr(made._cache, "_cache_file", None)
    if hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = _stamp(Path(function.__code__.co_filename).parent)
    return made


def _disabled() -> bool:
    """Whether ``NUMBA_DISABLE_JIT=1`` turned kernels into plain Python."""
    return bool(getattr(numba.config, "DISABLE_JIT", 0))


def inline(function: Callable | None = None, *, plain: Callable | None = None) -> Any:
    """Makes a small helper that is only ever called from kernels, and compiled as part of each of them.

    Left to be inlined later, references to its arrays are counted at every call: a third of the time of short sweeps.
    What is returned is a Python function, so that interpreted kernels call it as such, with what numba asks of what it
    puts in a call's place.
    """
    if function is None:
        return lambda function: inline(function, plain=plain)
    called: Any = plain or function
    if not _disabled():
        made = numba.njit(fastmath=_FASTMATH, nogil=True, inline="always")(function)
        called.py_func, called.targetoptions = function, made.targetoptions
        called._numba_type_, called.dispatcher = made._numba_type_, made
    return called


@cache
def _stamp(folder: Path) -> str:
    """A digest of all kernels that a kernel may call: numba looks only at its own file, so edited callees go stale.

    Kernels call only kernels of their own folder.
    """
    digest = hashlib.sha256(repr(sorted(_FASTMATH)).encode())
    for path in sorted(folder.glob("*.py")):
        text = path.read_bytes()
        if b"@kernel" in text or b"@inline" in text:
            digest.update(text)
    return digest.hexdigest()


def _num_instructions(function: Callable, seen: set[Callable]) -> int:
    """Of a function's bytecode and of what it calls: each kernel once, what is inlined wherever it is called."""
    total = 0
    for instruction in dis.get_instructions(function):
        total += 1
        callee = function.__globals__.get(instruction.argval) if instruction.opname == "LOAD_GLOBAL" else None
        inner = getattr(callee, "py_func", None)
        if inner is not None and inner not in seen:
            if isinstance(callee, Kernel):
                seen.add(inner)
            total += _num_instructions(inner, seen)
    return total


def _is_small(args: tuple) -> bool:
    return sum(_num_elements(arg) for arg in args) <= _MOST_ELEMENTS


def _num_elements(arg: Any) -> int:
    if isinstance(arg, np.ndarray):
        return arg.size
    if isinstance(arg, tuple):
        return arg.num_used if hasattr(arg, "num_used") else sum(_num_elements(part) for part in arg)
    return 0


def _native(result: Any) -> Any:
    """What compiled code would return: Python's numbers, not NumPy's."""
    if isinstance(result, tuple):
        parts = [_native(part) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return result.item() if isinstance(result, np.generic) else result
