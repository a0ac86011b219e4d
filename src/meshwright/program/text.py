"""A program as text that a person can follow: one line for each operation, regions indented.

`program_form` is the part of it by which a plan knows the program that it was made for, and `first_difference` says
where two of them part.
"""

from collections import Counter
from collections.abc import Iterator
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

# `program.py`, which has the classes, imports this module to print them.
Operation: TypeAlias = Any
Program: TypeAlias = Any

_SHORT = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}
_SHOWN = 60  # characters of a scope: the end says most
_OF_LOOPS = ("length", "reverse")  # of an operation with regions, these say more than the regions do


def program_text(program: Program) -> str:
    """All operations, with ids, types, parameters, scopes and source lines."""
    kinds = Counter(operation.name for operation in program.walk())
    most = ", ".join(f"{count} {name}" for name, count in kinds.most_common(5))
    head = f"program of {program.num_ids} operations ({most})" if most else "program without operations"
    return "\n".join([head, *_lines(program, "", is_form=False)])


def program_form(program: Program) -> str:
    """The same without what a plan does not depend on: scopes, source lines and the contents of constants."""
    return "\n".join(_lines(program, "", is_form=True))


class Difference(NamedTuple):
    """Where two programs part: a line of each, or that it has ended."""

    planned: str
    found: str


def first_difference(planned: str, found: str) -> Difference | None:
    """The first lines in which two forms differ; None where they are equal."""
    if planned == found:
        return None
    end = "nothing more"
    lines = [*planned.splitlines(), end], [*found.splitlines(), end]
    return next(Difference(a.strip(), b.strip()) for a, b in zip(*lines, strict=False) if a != b)


def _lines(program: Program, indent: str, is_form: bool) -> Iterator[str]:
    yield f"{indent}takes {', '.join(_typed(program, value) for value in program.inputs) or 'nothing'}"
    scope = None
    for operation in program.operations:
        if operation.scope != scope and not is_form:
            scope = operation.scope
            yield f"{indent}# {scope if len(scope) <= _SHOWN else '…' + scope[-_SHOWN:]}"
        yield from _operation_lines(program, operation, indent, is_form)
    yield f"{indent}returns {', '.join(_value(program, value, is_form) for value in program.outputs) or 'nothing'}"


def _operation_lines(program: Program, operation: Operation, indent: str, is_form: bool) -> Iterator[str]:
    results = ", ".join(_typed(program, value) for value in operation.outputs)
    operands = ", ".join(_value(program, value, is_form) for value in operation.inputs)
    source = "" if is_form or not operation.source else f"    {operation.source}"
    parameters = _parameters(operation)
    yield f"{indent}#{operation.id:<5} {results or 'nothing'} = {operation.name}{parameters}({operands}){source}"
    for number, region in enumerate(operation.regions):
        if len(operation.regions) > 1:
            yield f"{indent}  region {number}"
        yield from _lines(region, indent + "    ", is_form)


def _parameters(operation: Operation) -> str:
    """The parameters that are plain data and say something: neither functions nor what is off or empty."""
    named = operation.equation.params.items()
    shown = ((name, _plain(value)) for name, value in named if not operation.regions or name in _OF_LOOPS)
    text = ", ".join(f"{name}={value}" for name, value in shown if value not in ("", "None", "False", "()"))
    return f"[{text}]" if text else ""


def _plain(value: Any) -> str:
    """Plain data as text, equal for equal data; empty for anything else."""
    if isinstance(value, tuple | list):
        parts = [_plain(part) for part in value]
        return f"({', '.join(parts)})" if all(parts) else ""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, np.dtype):
        return _dtype(str(value))
    return str(value) if value is None or isinstance(value, bool | int | float | str) else ""


def _value(program: Program, value: int, is_form: bool) -> str:
    """A value's number; of a constant, what it is, where it is one number, or in a form its type."""
    if value not in program.constants:
        return f"%{value}"
    if is_form:
        return _type(program.types[value])
    constant: Any = program.constants[value]
    is_number = constant is not None and getattr(constant, "shape", ()) == () and not hasattr(constant, "aval")
    return str(constant) if is_number else f"%{value}"


def _typed(program: Program, value: int) -> str:
    return f"%{value}:{_type(program.types[value])}"


def _type(aval: Any) -> str:
    return _array(aval.shape, aval.dtype) if hasattr(aval, "shape") else str(aval)


@lru_cache(maxsize=2**12)
def _array(shape: tuple[Any, ...], dtype: Any) -> str:
    """A type, which thousands of values share: the name of a dtype takes NumPy a while."""
    return f"{_dtype(str(dtype))}[{','.join(map(str, shape))}]"


def _dtype(name: str) -> str:
    for long, short in _SHORT.items():
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name
