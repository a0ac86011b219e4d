"""A program as text that a person can follow: one line for each operation, regions indented."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias

# `program.py`, which has the classes, imports this module to print them.
Operation: TypeAlias = Any
Program: TypeAlias = Any

_SHORT = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}
_SHOWN = 60  # characters of a scope: the end says most


def program_text(program: Program) -> str:
    """All operations, with ids, types, scopes and source lines."""
    kinds = Counter(operation.name for operation in program.walk())
    most = ", ".join(f"{count} {name}" for name, count in kinds.most_common(5))
    head = f"program of {program.num_ids} operations ({most})" if most else "program without operations"
    return "\n".join([head, *_lines(program, "")])


def _lines(program: Program, indent: str) -> Iterator[str]:
    yield f"{indent}takes {', '.join(_typed(program, value) for value in program.inputs) or 'nothing'}"
    scope = None
    for operation in program.operations:
        if operation.scope != scope:
            scope = operation.scope
            yield f"{indent}# {scope if len(scope) <= _SHOWN else '…' + scope[-_SHOWN:]}"
        yield from _operation_lines(program, operation, indent)
    yield f"{indent}returns {', '.join(_value(program, value) for value in program.outputs) or 'nothing'}"


def _operation_lines(program: Program, operation: Operation, indent: str) -> Iterator[str]:
    results = ", ".join(_typed(program, value) for value in operation.outputs)
    operands = ", ".join(_value(program, value) for value in operation.inputs)
    source = f"    {operation.source}" if operation.source else ""
    trips = f" of {operation.equation.params['length']} trips" if operation.name == "scan" else ""
    yield f"{indent}#{operation.id:<5} {results or 'nothing'} = {operation.name}{trips}({operands}){source}"
    for number, region in enumerate(operation.regions):
        if len(operation.regions) > 1:
            yield f"{indent}  region {number}"
        yield from _lines(region, indent + "    ")


def _value(program: Program, value: int) -> str:
    """A value's number; what a constant is, where it is one number."""
    constant: Any = program.constants.get(value)
    if constant is not None and getattr(constant, "shape", ()) == () and not hasattr(constant, "aval"):
        return str(constant)
    return f"%{value}"


def _typed(program: Program, value: int) -> str:
    aval = program.types[value]
    if not hasattr(aval, "shape"):
        return f"%{value}:{aval}"
    return f"%{value}:{_dtype(str(aval.dtype))}[{','.join(map(str, aval.shape))}]"


def _dtype(name: str) -> str:
    for long, short in _SHORT.items():
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name
