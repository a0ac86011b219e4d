"""Reads the fields of a body, each with its type and its bounds, and refuses by name what is wrong."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from meshwright.serving.server.refusals import Refusal


class Fields:
    """The fields of one JSON object; a field that is null counts as left out."""

    def __init__(self, content: Mapping[str, Any], path: str = ""):
        self._content = {name: value for name, value in content.items() if value is not None}
        self._path = path
        self._read: set[str] = set()

    def value(self, name: str) -> object:
        """A field as it is; None if it is left out."""
        self._read.add(name)
        return self._content.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """A truth value."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """A text without halves of characters."""
        value = self.value(name)
        return default if value is None else self.checked_text(name, value)

    def checked_text(self, name: str, value: Any) -> str:
        """The same of a value that stands somewhere within the field."""
        if not isinstance(value, str):
            raise self.wrong(name, "a text", value)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.wrong(name, "a text without single surrogates, which are halves of characters", value) from None
        return value

    def integer(self, name: str, default: int | None, least: int, most: int) -> int | None:
        """A whole number within bounds."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, f"a whole number between {least} and {most}")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number within bounds."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.wrong(name, f"a number between {least:g} and {most:g}")
        return float(value)

    def table(self, name: str) -> "Fields":
        """An object, empty if it is left out."""
        value = self.value(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self._path}{name}.")

    def tokens(self, name: str, value: Any, vocab: int) -> tuple[int, ...]:
        """A list of numbers of tokens."""
        if not isinstance(value, list) or not all(type(token) is int and 0 <= token < vocab for token in value):
            raise self.wrong(name, f"numbers of tokens, each between 0 and {vocab - 1}", value)
        return tuple(value)

    def left(self) -> Mapping[str, Any]:
        """The fields that nobody has read."""
        return {name: value for name, value in self._content.items() if name not in self._read}

    def wrong(self, name: str, legal: str, value: Any = None) -> Refusal:
        """The refusal of a field's value."""
        value = self._content[name] if value is None else value
        given = json.dumps(value)
        shown = given if len(given) <= 60 else f"{given[:57]}..."
        path = f"{self._path}{name}"
        return Refusal(HTTPStatus.BAD_REQUEST, f"{path} is {shown}; give {legal}", path, "invalid_value")
