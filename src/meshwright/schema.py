"""Plain data from files: parsed without surprises, and held against the types that dataclasses declare.

A file may come from anyone, and may be damaged. So whatever it holds ends in values of the types that the code counts
on, or in one `ValueError` that says where it does not. The annotations of the dataclasses are the schema; `Annotated`
with a `Between` bounds a number.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_MOST = 2**53  # whole numbers beyond are none of ours: floats, and so JSON of other programs, do not hold them


@dataclass(frozen=True)
class Between:
    """Bounds of a number, both legal."""

    least: float
    most: float = _MOST


MADE = "checked when it was made"  # a mark for types that check themselves

Count = Annotated[int, Between(1)]  # at least one
Size = Annotated[int, Between(0)]  # bytes, dims, places
Place = Annotated[int, Between(-1)]  # a place, or -1 for none
_VAST = 1e100  # far beyond any of ours; products and quotients of three such numbers are still finite
Amount = Annotated[float, Between(0, _VAST)]  # seconds, FLOPs, shares
Rate = Annotated[float, Between(1 / _VAST, _VAST)]  # divided by


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: It is none, or is nested so deeply that none of ours can be meant.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists or tables are nested too deeply") from None


T = TypeVar("T")


def checked(value: T, kind: Any, where: str) -> T:
    """The value itself, if it is of a type, all the way down.

    Args:
        value: Data from a file, or a value made from it.
        kind: A type, as annotations write it.
        where: The name of the value in messages.

    Raises:
        ValueError: It is not; the message says where, what is there, and what should be.

    >>> checked({"x": [1, 2]}, dict[str, tuple[int, ...]], "sizes")
    {'x': [1, 2]}
    """
    with _placed(where):
        _reader(kind, False)(value)
    return value


def built(kind: type[T], data: Any, where: str) -> T:
    """A value of a type from plain data, checked all the way down.

    Lists become tuples; a table, or a list in the order of the fields, becomes a dataclass. What has its type already
    stays.

    Args:
        kind: A type, as annotations write it.
        data: Data from a file.
        where: The name of the value in messages.

    Raises:
        ValueError: It is none: an entry is missing, unknown, or of another type; the message says which.

    >>> built(Between, {"least": 1}, "bounds")
    Between(least=1, most=9007199254740992)
    >>> built(Between, {"most": 1}, "bounds")
    Traceback (most recent call last):
    ValueError: bounds.least is missing
    """
    wanted: Any = kind
    with _placed(where):
        value = _reader(wanted, True)(data)
    return cast(T, value)


@contextmanager
def _placed(where: str) -> Iterator[None]:
    """Turns a misfit into an error that begins with its place."""
    try:
        yield
    except _Misfit as misfit:
        raise ValueError(f"{where}{misfit.path} {misfit.fault}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None


class _Misfit(Exception):
    def __init__(self, value: Any, wanted: str, fault: str = ""):
        self.wanted, self.path = wanted, ""
        self.fault = fault or f"is {_shown(value)} but must be {wanted}"


Reader = Callable[[Any], object]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


@cache
def _reader(kind: Any, builds: bool) -> Reader:
    """Gives a value of a type back, and refuses any other; where it builds, one that is made from plain data."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any or kind is object:
        return lambda value: value
    if origin is Annotated and MADE in args:
        return _only(lambda value: isinstance(value, args[0]), f"a {args[0].__name__}")
    if origin is Annotated:
        return _bounded(_reader(args[0], builds), next(a for a in args[1:] if isinstance(a, Between)))
    if origin is Literal:
        return _only(lambda value: value in args, f"one of {', '.join(map(str, args))}")
    if origin in (Union, UnionType):
        return _any_of([_reader(arg, builds) for arg in args])
    if origin is tuple and args[-1] is not Ellipsis:
        return _row([_reader(arg, builds) for arg in args], builds)
    if origin in (tuple, list, Sequence):
        is_built = builds and origin is tuple
        return _many(_reader(args[0], is_built), is_built)
    if origin in (dict, Mapping):
        return _table(_reader(args[1], False))
    if is_dataclass(kind):
        return _record(kind, builds)
    if getattr(origin, "__name__", "") == "NDArray":  # an alias with a name of its own in later versions of NumPy
        return _array(args[0])
    if getattr(origin, "__name__", "") == "ndarray":
        return _array(get_args(args[1])[0])
    return _PLAIN[kind]


def _only(fits: Callable[[Any], bool], wanted: str) -> Reader:
    def read(value: Any) -> object:
        if not fits(value):
            raise _Misfit(value, wanted)
        return value

    return read


def _is_int(value: Any) -> bool:
    return type(value) is int and -_MOST <= value <= _MOST


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


_PLAIN: dict[Any, Reader] = {
    int: _only(_is_int, "a whole number"),
    float: _only(_is_number, "a finite number"),
    str: _only(lambda value: isinstance(value, str), "text"),
    bool: _only(lambda value: isinstance(value, bool), "true or false"),
    dict: _only(lambda value: isinstance(value, dict), "a table"),
    list: _only(lambda value: isinstance(value, list), "a list"),
    NoneType: _only(lambda value: value is None, "nothing"),
}


def _bounded(inner: Callable[[Any], Any], bounds: Between) -> Reader:
    def read(value: Any) -> object:
        number = inner(value)
        if not bounds.least <= number <= bounds.most:
            most = f" and at most {bounds.most:g}" if bounds.most < _MOST else ""
            raise _Misfit(value, f"at least {bounds.least:g}{most}")
        return number

    return read


def _any_of(inner: list[Reader]) -> Reader:
    def read(value: Any) -> object:
        wanted = []
        for one in inner:
            try:
                return one(value)
            except _Misfit as misfit:
                if misfit.path or not misfit.wanted:  # it is of this type, but for what is inside
                    raise
                wanted.append(misfit.wanted)
        raise _Misfit(value, " or ".join(wanted))

    return read


def _many(inner: Reader, builds: bool) -> Reader:
    def read(value: Any) -> object:
        if not isinstance(value, list | tuple):
            raise _Misfit(value, "a list")
        items = [_within(inner, item, f"[{place}]") for place, item in enumerate(value)]
        return tuple(items) if builds else value

    return read


def _row(inner: list[Reader], builds: bool) -> Reader:
    def read(value: Any) -> object:
        if not isinstance(value, list | tuple) or len(value) != len(inner):
            raise _Misfit(value, f"a list of {len(inner)}")
        pairs = enumerate(zip(inner, value, strict=True))
        items = [_within(one, item, f"[{place}]") for place, (one, item) in pairs]
        return tuple(items) if builds else value

    return read


def _table(inner: Reader) -> Reader:
    def read(value: Any) -> object:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _Misfit(value, "a table")
        for key, item in value.items():
            _within(inner, item, f"[{key!r}]")
        return value

    return read


def _record(kind: Any, builds: bool) -> Reader:
    """An instance of a dataclass, each of whose fields is of its type; it may hold others of its kind."""

    @cache
    def inner(builds: bool) -> dict[str, Reader]:
        hints = get_type_hints(kind, include_extras=True)
        return {field.name: _reader(hints[field.name], builds) for field in fields(kind)}

    def read(value: Any) -> object:
        if isinstance(value, kind):
            for name, one in inner(False).items():
                _within(one, getattr(value, name), f".{name}")
            return value
        if not builds or value is None:
            raise _Misfit(value, f"a {kind.__name__}")
        entries = _as_table(kind, value).items()
        return kind(**{name: _within(inner(True)[name], item, f".{name}") for name, item in entries})

    return read


def _as_table(kind: Any, value: Any) -> Mapping[str, Any]:
    """The entries for a dataclass of a table, or of a list in the order of its fields: none unknown, none missing."""
    names = [field.name for field in fields(kind) if field.init]
    if isinstance(value, list | tuple) and len(value) <= len(names):
        value = dict(zip(names, value, strict=False))
    if not isinstance(value, Mapping):
        raise _Misfit(value, "a table")
    for name in value:
        if name not in names:
            close = get_close_matches(str(name), names, n=1)
            nearest = f"; the nearest is {close[0]!r}" if close else ""
            raise _Misfit(value, "", f"has an entry {_shown(name)}, which is none of {', '.join(names)}{nearest}")
    for field in fields(kind):
        if field.init and field.default is MISSING and field.default_factory is MISSING and field.name not in value:
            misfit = _Misfit(value, "", "is missing")
            misfit.path = f".{field.name}"
            raise misfit
    return value


def _array(scalar: Any) -> Reader:
    import numpy as np  # here, so that a plan is read and printed without it

    wanted = np.dtype(scalar)

    def read(value: Any) -> object:
        if not isinstance(value, np.ndarray) or value.dtype != wanted:
            raise _Misfit(value, f"an array of {wanted}")
        if wanted.kind == "f" and np.isnan(value).any():
            raise _Misfit(value, "an array of numbers")
        return value

    return read


def _within(step_into: Reader, value: Any, step: str) -> object:
    try:
        return step_into(value)
    except _Misfit as misfit:
        misfit.path = step + misfit.path
        raise
