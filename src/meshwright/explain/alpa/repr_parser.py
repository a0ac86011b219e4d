"""Parses Python's printed form of nested containers: calls, tuples, lists, dicts with bare keys, opaque objects.

That form is almost an expression of Python: what is not is rewritten, and Python's own parser reads the rest.
"""

import ast
import re
from dataclasses import dataclass, field
from typing import Any

_OPAQUE = "<(?>[^<>]|<(?>[^<>]|<[^<>]*>)*>)*>"  # ``<function f.<locals>.g at 0x7f>``
_UNLIKE_PYTHON = re.compile(
    rf"""(?P<text>(['"])(?:\\.|(?!\2).)*\2)|(?P<opaque>{_OPAQUE})|(?P<empty>(?<=\w)\[\])"""
    r"""|(?P<key>[^\s:,{}()\[\]<>'"]+)(?=\s*:)""",
    re.DOTALL,
)


@dataclass(frozen=True)
class Call:
    """``Name(positional, keyword=value)``."""

    name: str
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)

    def get(self, keyword: str, position: int) -> Any:
        """An argument by keyword or position.

        Raises:
            ValueError: It is not there.
        """
        if keyword in self.keywords:
            return self.keywords[keyword]
        if position < len(self.args):
            return self.args[position]
        raise ValueError(f"{self.name} lacks its {keyword}")


def parse(text: str) -> Any:
    """Reads one printed value; ``float32[2,3]`` becomes ``("float32", [2, 3])``, an opaque ``<…>`` None.

    >>> parse("F({\\n a: Spec(x=(1,), y=f4[2])})")
    Call(name='F', args=({'a': Call(name='Spec', args=(), keywords={'x': (1,), 'y': ('f4', [2])})},), keywords={})

    Raises:
        ValueError: The text is not what Python prints; the message says where.
    """
    expression = _UNLIKE_PYTHON.sub(_as_python, text.strip())
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except SyntaxError as error:
        line = error.lineno or 1
        near = expression.split("\n")[line - 1][max((error.offset or 1) - 1, 0) :][:30]
        is_open = "<" in near.partition(">")[0]
        what = "an opening '<' that is not closed" if is_open else f"expected what Python prints ({error.msg})"
        raise ValueError(f"line {line}: {what}, near {near!r}") from None


def _as_python(found: re.Match[str]) -> str:
    """A part of the printed form as Python would have it written, in as many lines."""
    if found["opaque"]:
        return f"(None{chr(10) * found[0].count(chr(10))})"
    if found["empty"]:
        return "[()]"
    return repr(found["key"]) if found["key"] else found[0]


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Tuple(elts=items):
            return tuple(map(_value, items))
        case ast.List(elts=items):
            return list(map(_value, items))
        case ast.Dict(keys=keys, values=values):
            return {str(_value(key)): _value(value) for key, value in zip(keys, values, strict=True) if key}
        case ast.Call(func=name, args=args, keywords=keywords):
            named = {str(one.arg): _value(one.value) for one in keywords}
            return Call(ast.unparse(name), tuple(map(_value, args)), named)
        case ast.Subscript(value=name, slice=shape):
            sizes = _value(shape)
            return ast.unparse(name), list(sizes) if isinstance(sizes, tuple) else [sizes]
        case ast.Name() | ast.Attribute():
            return ast.unparse(node)
    raise ValueError(f"line {getattr(node, 'lineno', 1)}: expected a value, near {ast.unparse(node):.30}")
