"""Reads TOML tables of hardware figures and says clearly what is wrong with a bad one."""

import difflib
import re
import tomllib
from collections.abc import Iterable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from meshwright.errors import ClusterError
from meshwright.units import parse_bytes

_RATE = re.compile(r"\s*([0-9.]+)\s*([kmgt]?)bit/s\s*", re.IGNORECASE)
_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def read_toml(path: Path | Traversable) -> dict[str, Any]:
    """Reads a TOML file; a malformed one is a `ClusterError` that names the line."""
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ClusterError(f"there is no file {str(path)!r}: check the path, or write e.g. '4x8 h100'.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read {str(path)!r} ({error}): give the path of a TOML text file.") from None
    try:
        return tomllib.loads(content)
    except RecursionError:
        raise ClusterError(f"{str(path)!r} is no description of machines: its values are nested too deeply.") from None
    except ValueError as error:  # TOMLDecodeError is one; a number of thousands of digits is another
        what = str(error).replace("at end of document", f"at line {content.count(chr(10)) + 1}, the end of the file")
        raise ClusterError(
            f"{str(path)!r} is not valid TOML: {what}. Each line is 'key = value' or a '[table]'; strings need quotes."
        ) from None


def check_keys(table: dict[str, Any], legal: Iterable[str], where: str) -> None:
    """Refuses keys that nobody would read, naming the nearest legal one."""
    keys = sorted(legal)
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ClusterError(f"{where}: unknown key {key!r:.60}; {hint}legal keys are {', '.join(keys)}.")


def quantity(value: Any, where: str, *, zero: bool = False, most: float | None = None) -> float:
    """A positive number: plain, or text with a unit such as ``"40GB"``, ``"25GB/s"`` or ``"200Gbit/s"``."""
    number = _parse(value, where)
    if number < 0 or (number == 0 and not zero):
        raise ClusterError(f"{where} is {value!r:.60} but must be {'at least' if zero else 'above'} 0.")
    if most is not None and number > most:
        raise ClusterError(f"{where} is {value!r:.60} but must be at most {most:g}.")
    if number != number or number == float("inf"):
        raise ClusterError(f"{where} is {value!r:.60} but must be a finite number.")
    return number


def whole(value: Any, where: str) -> int:
    """A whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ClusterError(f"{where} is {value!r:.60} but must be a whole number of at least 1.")
    return value


def text(value: Any, where: str) -> str:
    """A non-empty string."""
    if not isinstance(value, str) or not value:
        raise ClusterError(f"{where} is {value!r:.60} but must be text in quotes.")
    return value


def subtable(table: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """A nested table, empty where it is absent."""
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise ClusterError(
            f"{where}: {key!r} is {value!r:.60} but must be a table: write [{key}] on a line of its own."
        )
    return value


def required(table: dict[str, Any], key: str, where: str) -> Any:
    if key not in table:
        raise ClusterError(f"{where}: the key {key!r} is missing; add a line '{key} = …'.")
    return table[key]


def _parse(value: Any, where: str) -> float:
    if isinstance(value, str):
        bits = _RATE.fullmatch(value)
        try:
            if bits:
                return float(bits[1]) * _POWERS[bits[2].lower()] / 8
            return float(parse_bytes(value.strip().removesuffix("/s")))
        except (ValueError, OverflowError):
            raise ClusterError(
                f"{where}: cannot read {value!r:.60}; write e.g. '40GB', '25GB/s' or '200Gbit/s'."
            ) from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ClusterError(f"{where} is {value!r:.60} but must be a number, or text such as '40GB' or '200Gbit/s'.")
    return float(value)
