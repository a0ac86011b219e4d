"""The decorators of every kernel: a kernel is interpreted while that is quicker than compiling it.

Compiling a kernel takes from half a second to half a minute. A small problem calls dozens of kernels, each for a few
milliseconds. So a kernel that has no machine code on disk is interpreted, either as the Python function it is or as an
equivalent function in NumPy, until interpreting it has taken as long as compiling it would. At worst this doubles the
time of the first use, at best it saves all of the compilation. Interpreted and compiled kernels return the same bits:
no sum is reordered or contracted. A call whose work depends on more than the sizes of its arguments may be abandoned
where it calls `pause`, and begins again compiled.

Machine code is cached on disk. A change of any file with kernels in the same folder invalidates it.
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

from meshwright import background_compile

# Infinities are legal values in every kernel (impossible pairs), NaN never occurs: so nnan is set, not ninf. No flag
# may change the rounding, which has to be that of the interpreter.
_FASTMATH = {"nnan", "nsz"}

_COMPILE_S = 5e-3  # per bytecode instruction, callees included; fitted to bridge, fold, sweep and settle_edge
_MOST_ELEMENTS = 4_000_000  # in the arguments of an interpreted call: one pass over them takes about a second

# The type of an index in an inner loop: an unsigned index cannot be negative, so numba omits the wrap-around. LLVM
# vectorises loops over such indices if they compare with `if` rather than call `min`. It would vectorise slices too,
# but those cost more than they gain where nodes have few states.
place = np.uint64


def _find_blas() -> None:
    """Lets numba find BLAS without importing scipy.linalg, which takes 0.2 s and which no kernel here uses.

    Before it compiles its first kernel, numba imports one extension module of that package to see whether it exists. An
    empty package replaces scipy.linalg during that import and is removed afterwards, so that later imports of
    scipy.linalg are not affected.
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
    """The state of this thread.

    Attributes:
        interpreting: Whether it is inside an interpreted kernel.
        until: The CPU time at which the kernel that is interpreted is abandoned.
        noted: The kernels that were called, where they are recorded instead of compiled; None where they are not.
    """

    interpreting = False
    until = np.inf
    noted: "dict[str, Needed] | None" = None


class Compiling:
    """The compilations of this process, and who is notified of them.

    Attributes:
        names: The names of the kernels that were compiled; each was compiled with all kernels that it calls.
        seconds: Time spent on compiling kernels, on loading compiled ones from disk, and on interpreting instead those
            that pause.
        watchers: Called with a sentence before a kernel is compiled, and with None afterwards.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.seconds = 0.0
        self.watchers: list[Callable[[str | None], None]] = []
        self._busy = threading.RLock()

    @contextmanager
    def making(self, kernel: "Kernel") -> Iterator[None]:
        """Counts the time, and notifies the watchers unless the kernel is only loaded from disk."""
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
    """`time.perf_counter` without the time in which kernels are loaded or compiled: that time is not solving time."""
    return time.perf_counter() - compiling.seconds


class _Overtime(Exception):
    """A kernel was interpreted for as long as compiling it takes."""


class Kernel(CPUDispatcher):
    """A function that is interpreted until compiling it is worthwhile.

    Attributes:
        plain: The Python function that runs where the kernel is interpreted.
        interpretable: Whether it may be interpreted.
        pauses: Whether it calls `pause`, so that an interpreted call may be abandoned.
        spent_s: CPU time for which it was interpreted, including the functions that it called.
    """

    plain: Callable
    interpretable: bool
    pauses: bool
    spent_s = 0.0
    _kept = False
    _cache: Any

    @property
    def name(self) -> str:
        return f"{self.py_func.__module__.removeprefix('meshwright.')}.{self.py_func.__name__}"

    @property
    def is_kept(self) -> bool:
        """Whether its machine code exists, in this process or on disk."""
        self._kept = self._kept or bool(self.overloads) or self._is_on_disk()
        return self._kept

    def _is_on_disk(self) -> bool:
        path = self.index_path
        if path is None or not path.exists():
            return False
        try:
            return bool(self._cache._cache_file._load_index())
        except Exception:  # an index of an earlier version of numba, which numba itself could not read either
            path.unlink(missing_ok=True)
            return False

    @cached_property
    def index_path(self) -> Path | None:
        """The file that lists its machine code on disk; None where no folder can be written."""
        file: Any = getattr(self._cache, "_cache_file", None)
        return None if file is None else Path(file._index_path)

    @cached_property
    def patience_s(self) -> float:
        """An estimate of its compile time."""
        return _COMPILE_S * _num_instructions(self.py_func, set())

    def _compile_for_args(self, *args: Any, **named: Any) -> Callable:
        """Returns what a call runs; numba calls this for types of arguments for which it has no machine code."""
        if _here.noted is not None and not _here.interpreting:
            needed = Needed(self, tuple(map(self.typeof_pyval, args)))
            _here.noted.setdefault(str(needed), needed)
            return self._interpret
        if _here.interpreting and (self.interpretable or _here.noted is not None):
            return self.plain
        if self.interpretable and not self.is_kept and self.spent_s < self.patience_s and _is_small(args):
            return self._interpret
        if not self.is_kept:
            background_compile.start()
        with compiling.making(self), background_compile.claimed(self.lock_path):
            return super()._compile_for_args(*args, **named)  # type: ignore[misc]

    @property
    def lock_path(self) -> Path | None:
        """The lock file of whoever compiles it; None where it needs none."""
        return None if self.index_path is None or self.is_kept else self.index_path.with_suffix(".lock")

    def _interpret(self, *args: Any) -> Any:
        if _here.interpreting:
            return self.plain(*args)
        before = [(array, array.copy()) for array in _written(args)] if self.pauses else []
        started, begin, _here.interpreting = time.perf_counter(), time.thread_time(), True
        if _here.noted is None and self.spent_s < self.patience_s:
            _here.until = begin + self.patience_s - self.spent_s
        try:
            with np.errstate(all="ignore"):  # hashes wrap around, as they do in machine code
                return _native(self.plain(*args))
        except _Overtime:
            for array, content in before:
                array[...] = content
        finally:
            _here.interpreting, _here.until = False, np.inf
            self.spent_s += time.thread_time() - begin
            if self.pauses:  # compiled it would have taken next to no time, and waiting for that would not have counted
                compiling.seconds += time.perf_counter() - started
        return self(*args)


@dataclass(frozen=True, eq=False)
class Needed:
    """A kernel and the types of the arguments that it is called with."""

    kernel: Kernel
    types: tuple

    def __str__(self) -> str:
        return f"{self.kernel.name}{self.types}"

    def compile(self) -> None:
        """Compiles it to disk, unless that is done or another process is doing it."""
        with background_compile.claimed(self.kernel.lock_path, patient=False) as free:
            if free:
                self.kernel.compile(self.types)


@contextmanager
def noting() -> Iterator[dict[str, Needed]]:
    """Interprets every kernel that is called within, and records it with the types it would be compiled for."""
    noted: dict[str, Needed] = {}
    _here.noted = noted
    try:
        yield noted
    finally:
        _here.noted = None


def kernel(
    function: Callable | None = None,
    *,
    plain: Callable | None = None,
    interpretable: bool = True,
    pauses: bool = False,
    nan: bool = False,
) -> Callable:
    """Makes a function a kernel.

    Args:
        function: Loops over arrays.
        plain: An equivalent function in NumPy, which is quicker than loops where the kernel is interpreted.
        interpretable: Whether it may be interpreted; False where it draws random numbers.
        pauses: Whether its work depends on more than the sizes of its arguments, and it calls `pause` often.
        nan: Whether NaN may occur.
    """
    if function is None:
        return lambda function: kernel(function, plain=plain, interpretable=interpretable, pauses=pauses, nan=nan)
    if _disabled():
        return plain or function
    options = {"nopython": True, "boundscheck": None, "fastmath": not nan and _FASTMATH, "nogil": True}
    made = Kernel(function, {}, options)
    made.plain, made.interpretable, made.pauses = plain or function, interpretable, pauses
    made.enable_caching()
    cache_file: Any = getattr(made._cache, "_cache_file", None)
    if hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = _stamp(Path(function.__code__.co_filename).parent)
    return made


def _disabled() -> bool:
    """Whether ``NUMBA_DISABLE_JIT=1`` turned kernels into plain Python."""
    return bool(getattr(numba.config, "DISABLE_JIT", 0))


def inline(function: Callable | None = None, *, plain: Callable | None = None) -> Callable:
    """Makes a function a helper that only kernels call, and that numba inlines into each of them.

    If LLVM inlined it instead, its arrays would be reference-counted at every call, which takes a third of the time of
    short sweeps. The result is a Python function, so that interpreted kernels can call it, with the attributes that
    numba requires of a function to be inlined.
    """
    if function is None:
        return lambda function: inline(function, plain=plain)
    called: Any = plain or function
    if not _disabled():
        made = numba.njit(fastmath=_FASTMATH, nogil=True, inline="always")(function)
        called.py_func, called.targetoptions = function, made.targetoptions
        called._numba_type_, called.dispatcher = made._numba_type_, made
    return called


def _abandon() -> None:
    """Ends an interpreted call whose time is over."""
    if time.thread_time() > _here.until:
        raise _Overtime


@inline(plain=_abandon)
def pause():
    """A place at which an interpreted kernel may be abandoned; nothing in machine code."""


@cache
def _stamp(folder: Path) -> str:
    """A digest of all kernels that a kernel may call, which are those of its folder.

    numba itself checks only the file of the kernel, and would keep stale machine code after a change of a callee.
    """
    digest = hashlib.sha256(repr(sorted(_FASTMATH)).encode())
    for path in sorted(folder.glob("*.py")):
        text = path.read_bytes()
        if b"@kernel" in text or b"@inline" in text:
            digest.update(text)
    return digest.hexdigest()


def _num_instructions(function: Callable, seen: set[Callable]) -> int:
    """Instructions of a function's bytecode and of its callees: kernels count once, inlined helpers at every call."""
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


def _written(arg: Any) -> Iterator[np.ndarray]:
    """The arrays among some arguments that a kernel may change."""
    if isinstance(arg, np.ndarray) and arg.flags.writeable:
        yield arg
    elif isinstance(arg, tuple):
        for part in arg:
            yield from _written(part)


def _native(result: Any) -> Any:
    """Converts NumPy scalars to the Python numbers that compiled code returns."""
    if isinstance(result, tuple):
        parts = [_native(part) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return result.item() if isinstance(result, np.generic) else result
