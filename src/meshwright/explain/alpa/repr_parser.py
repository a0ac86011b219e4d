"""Parses Python's printed form of nested containers: calls, tuples, lists, dicts with bare keys, opaque objects."""

import re
from dataclasses import dataclass, field
from typing import Any

_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_TEXT = re.compile(r"""(['"])((?:\\.|(?!\1).)*)\1""", re.DOTALL)
_KEY = re.compile(r"[^\s:,{}()\[\]]+")
_WORDS = {"None": None, "True": True, "False": False}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


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
    parser = _Parser(text)
    value = parser.value()
    parser.space()
    if parser.at < len(text):
        raise parser.wrong("more text after the value")
    return value


class _Parser:
    def __init__(self, text: str):
        self.text, self.at = text, 0

    def wrong(self, what: str) -> ValueError:
        line = self.text.count("\n", 0, self.at) + 1
        near = self.text[self.at : self.at + 30].split("\n")[0]
        return ValueError(f"line {line}: {what}, near {near!r}")

    def space(self) -> None:
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def peek(self) -> str:
        self.space()
        return self.text[self.at : self.at + 1]

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.space()
        match = pattern.match(self.text, self.at)
        if match:
            self.at = match.end()
        return match

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise self.wrong(f"expected {character!r}")
        self.at += 1

    def value(self) -> Any:
        start = self.peek()
        if start == "(":
            return tuple(self.items("("))
        if start == "[":
            return self.items("[")
        if start == "{":
            return self.dict()
        if start == "<":
            return self.opaque()
        if text := self.take(_TEXT):
            return text[2]
        if number := self.take(_NUMBER):
            return float(number[0]) if any(c in number[0] for c in ".eE") else int(number[0])
        if name := self.take(_NAME):
            return self.named(name[0])
        raise self.wrong("expected a value")

    def named(self, name: str) -> Any:
        if name in _WORDS:
            return _WORDS[name]
        following = self.text[self.at : self.at + 1]
        if following == "(":
            args: list[Any] = []
            keywords: dict[str, Any] = {}
            self.arguments(args, keywords)
            return Call(name, tuple(args), keywords)
        if following == "[":
            return name, self.items("[")
        return name

    def arguments(self, args: list[Any], keywords: dict[str, Any]) -> None:
        self.expect("(")
        while self.peek() != ")":
            before = self.at
            name = self.take(_NAME)
            if name and self.peek() == "=":
                self.at += 1
                keywords[name[0]] = self.value()
            else:
                self.at = before
                args.append(self.value())
            self.separator(")")
        self.at += 1

    def items(self, opening: str) -> list[Any]:
        closing = _CLOSING[opening]
        self.expect(opening)
        values = []
        while self.peek() != closing:
            values.append(self.value())
            self.separator(closing)
        self.at += 1
        return values

    def separator(self, closing: str) -> None:
        if self.peek() == ",":
            self.at += 1
        elif self.peek() != closing:
            raise self.wrong(f"expected ',' or {closing!r}")

    def dict(self) -> dict[str, Any]:
        self.expect("{")
        entries: dict[str, Any] = {}
        while self.peek() != "}":
            key = self.take(_TEXT)
            name = key[2] if key else (bare := self.take(_KEY)) and bare[0]
            if not name:
                raise self.wrong("expected a key")
            self.expect(":")
            entries[name] = self.value()
            self.separator("}")
        self.at += 1
        return entries

    def opaque(self) -> None:
        """``<function f.<locals>.g at 0x7f>``: brackets nest."""
        depth = 0
        for place in range(self.at, len(self.text)):
            depth += (self.text[place] == "<") - (self.text[place] == ">")
            if depth == 0:
                self.at = place + 1
                return
        raise self.wrong("an opening '<' that is not closed")
