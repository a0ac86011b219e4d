"""The decorators of every kernel: a kernel is interpreted while that is quicker than compiling it.

Compiling a kernel takes from half a second to half a minute. A small problem calls dozens of kernels, each for a few
milliseconds. So a kernel that has no machine code on disk is interpreted, either as the Python function it is or as an
equivalent function in NumPy, until interpreting it has taken as long as compiling it would. At worst this doubles the
time of the first use, at best it saves all of the compilation. Interpreted and compiled kernels return the same bits:
no sum is reordered or contracted. A call whose work depends on more than the sizes of its arguments may be abandoned
where it calls `pause`, and begins again compiled.

Machine code is cached on disk. A change of the bytecode of a kernel, or of what it calls or names, invalidates it.
numba is imported with the first kernel that is called: a run that takes its plan from a file calls none.
"""

import dis
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from meshwright.jit import beside
from meshwright.scratch import claimed

# Infinities are legal values in every kernel (impossible pairs), NaN never occurs: so nnan is set, not ninf. No flag
# may change the rounding, which has to be that of the interpreter.
_FASTMATH = {"nnan", "nsz"}

_COMPILE_S = 5e-3  # per bytecode instruction, callees included; fitted to bridge, fold, sweep and settle_edge
_MOST_ELEMENTS = 4_000_000  # in the arguments of an interpreted call: one pass over them takes about a second

# The type of an index in an inner loop: an unsigned index cannot be negative, so numba omits the wrap-around. LLVM
# vectorises loops over such indices if they compare with `if` rather than call `min`. It would vectorise slices too,
# but those cost more than they gain where nodes have few states.
place = np.uint64


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
            begin, fresh = now(), not kernel.is_kept
            if fresh:
                self.names.append(kernel.name)
                self._tell(f"compiling {kernel.name}, once on this machine: about {kernel.patience_s:.0f} s")
            try:
                yield
            finally:
                self.seconds += now() - begin
                if fresh:
                    self._tell(None)

    def _tell(self, what: str | None) -> None:
        for watch in list(self.watchers):
            watch(what)


compiling = Compiling()
_here = _Here()


#: The time that searches and compilations count. Tests count CPU time, so that no search is cut short by other load.
now = time.perf_counter


def clock() -> float:
    """The time `now` without the time in which kernels are loaded or compiled: that time is not solving time."""
    return now() - compiling.seconds


class _Overtime(Exception):
    """A kernel was interpreted for as long as compiling it takes."""


class Kernel:
    """A function that is interpreted until compiling it is worthwhile.

    Attributes:
        function: The Python function that is compiled.
        plain: The Python function that runs where the kernel is interpreted.
        interpretable: Whether it may be interpreted.
        pauses: Whether it calls `pause`, so that an interpreted call may be abandoned.
        options: How numba compiles it.
        spent_s: CPU time for which it was interpreted, including the functions that it called.
    """

    def __init__(
        self, function: Callable, *, plain: Callable, interpretable: bool, pauses: bool, options: Mapping[str, Any]
    ) -> None:
        self.__doc__, self.__wrapped__ = function.__doc__, function
        self.function, self.plain = function, plain
        self.interpretable, self.pauses, self.options = interpretable, pauses, options
        self.spent_s = 0.0
        self._is_kept = False

    @cached_property
    def machine_code(self) -> Any:
        """What numba makes of it, for as many types of arguments as it is called with.

        numba keeps machine code until the file of the function changes, and would keep it when only a callee does.
        """
        import numba

        _prepare_helpers()
        dispatcher = numba.njit(cache=True, **self.options)(self.function)
        index: Any = getattr(dispatcher._cache, "_cache_file", None)
        if hasattr(index, "_source_stamp"):
            index._source_stamp = _stamp(self.function, self.options)
        return dispatcher

    @property
    def _numba_type_(self) -> Any:
        """What it is to numba where another kernel calls it: the function that numba compiles."""
        return self.machine_code._numba_type_

    @property
    def name(self) -> str:
        return f"{self.function.__module__.removeprefix('meshwright.')}.{self.function.__name__}"

    @property
    def is_kept(self) -> bool:
        """Whether its machine code exists, in this process or on disk."""
        self._is_kept = self._is_kept or bool(self.machine_code.overloads) or self._is_on_disk()
        return self._is_kept

    def _is_on_disk(self) -> bool:
        path = self.index_path
        if path is None or not path.exists():
            return False
        try:
            return bool(self.machine_code._cache._cache_file._load_index())
        except Exception:  # an index of an earlier version of numba, which numba itself could not read either
            path.unlink(missing_ok=True)
            return False

    @cached_property
    def index_path(self) -> Path | None:
        """The file that lists its machine code on disk; None where no folder can be written."""
        index: Any = getattr(self.machine_code._cache, "_cache_file", None)
        return None if index is None else Path(index._index_path)

    @cached_property
    def patience_s(self) -> float:
        """An estimate of its compile time."""
        return _COMPILE_S * _num_instructions(self.function, set())

    @property
    def lock_path(self) -> Path | None:
        """The lock file of whoever compiles it; None where it needs none."""
        return None if self.index_path is None or self.is_kept else self.index_path.with_suffix(".lock")

    def __call__(self, *args: Any) -> Any:
        if not self.machine_code.overloads:
            if _here.noted is not None and not _here.interpreting:
                needed = Needed(self, self._types(args))
                _here.noted.setdefault(str(needed), needed)
                return self._interpret(*args)
            if _here.interpreting and (self.interpretable or _here.noted is not None):
                return self.plain(*args)
            waits = self.interpretable and not self.is_kept and self.spent_s < self.patience_s
            if waits and _num_elements(args) <= _MOST_ELEMENTS:
                return self._interpret(*args)
            if not self.is_kept:
                beside.start()
            with compiling.making(self), claimed(self.lock_path):
                self.machine_code.compile(self._types(args))
        return self.machine_code(*args)

    def _types(self, args: tuple) -> tuple:
        return tuple(map(self.machine_code.typeof_pyval, args))

    def _interpret(self, *args: Any) -> Any:
        if _here.interpreting:
            return self.plain(*args)
        before = [(array, array.copy()) for array in _written(args)] if self.pauses else []
        started, begin, _here.interpreting = now(), time.thread_time(), True
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
                compiling.seconds += now() - started
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
        with claimed(self.kernel.lock_path, patient=False) as free:
            if free:
                self.kernel.machine_code.compile(self.types)


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
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):  # kernels are plain Python then
        return plain or function
    options = {"boundscheck": None, "fastmath": not nan and _FASTMATH, "nogil": True}
    return Kernel(function, plain=plain or function, interpretable=interpretable, pauses=pauses, options=options)


def inline(function: Callable | None = None, *, plain: Callable | None = None) -> Callable:
    """Makes a function a helper that only kernels call, and that numba inlines into each of them.

    If LLVM inlined it instead, its arrays would be reference-counted at every call, which takes a third of the time of
    short sweeps. The result is a Python function, so that interpreted kernels can call it, with the attributes that
    numba requires of a function to be inlined.
    """
    if function is None:
        return lambda function: inline(function, plain=plain)
    called: Any = plain or function
    called.py_func = function
    with _preparing:
        _helpers.append(called)
    return called


_helpers: list[Any] = []  # those that numba does not know yet
_preparing = threading.Lock()


def _prepare_helpers() -> None:
    """Gives helpers what numba requires of a function that it is to inline."""
    import numba

    with _preparing:
        while _helpers:
            helper = _helpers[-1]
            made = numba.njit(fastmath=_FASTMATH, nogil=True, inline="always")(helper.py_func)
            helper.targetoptions, helper._numba_type_, helper.dispatcher = made.targetoptions, made._numba_type_, made
            _helpers.pop()


def _abandon() -> None:
    """Ends an interpreted call whose time is over."""
    if time.thread_time() > _here.until:
        raise _Overtime


@inline(plain=_abandon)
def pause():
    """A place at which an interpreted kernel may be abandoned; nothing in machine code."""


def _stamp(function: Callable, options: Mapping[str, Any]) -> str:
    """A digest of what a kernel's machine code is made of: how, its bytecode, its callees and the numbers they name."""
    fastmath = sorted(options["fastmath"] or ())
    digest = hashlib.sha256(repr((fastmath, options["boundscheck"], options["nogil"])).encode())
    for part in _sources(function, set()):
        digest.update(part)
    return digest.hexdigest()


def _sources(function: Callable, seen: set[Callable]) -> Iterator[bytes]:
    seen.add(function)
    names: dict[str, None] = {}
    for code in _codes(function.__code__):
        plain = [constant for constant in code.co_consts if not isinstance(constant, CodeType)]
        yield code.co_code + repr((plain, code.co_names, code.co_varnames)).encode()
        names |= dict.fromkeys(code.co_names)
    for name in names:
        value = function.__globals__.get(name)
        callee = _compiled_function(value)
        if callee is None:
            described = value if isinstance(value, int | float | str | tuple) else getattr(value, "_fields", None)
            yield repr((name, described)).encode()
        elif callee not in seen:
            yield from _sources(callee, seen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The bytecode of a function, and that of the comprehensions within."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _compiled_function(value: Any) -> Callable | None:
    """The Python function that is compiled where a kernel calls this value; None if it is neither kernel nor helper."""
    return value.function if isinstance(value, Kernel) else getattr(value, "py_func", None)


def _num_instructions(function: Callable, seen: set[Callable]) -> int:
    """Instructions of a function's bytecode and of its callees: kernels count once, inlined helpers at every call."""
    total = 0
    for instruction in dis.get_instructions(function):
        total += 1
        value = function.__globals__.get(instruction.argval) if instruction.opname == "LOAD_GLOBAL" else None
        callee = _compiled_function(value)
        if callee is not None and callee not in seen:
            if isinstance(value, Kernel):
                seen.add(callee)
            total += _num_instructions(callee, seen)
    return total


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
