"""Prints bytes, seconds and rates for people, and parses sizes that people write."""

import re
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

#: A number, or an array of numbers, in the unit that the name says: what is computed of one is as many.
Numeric = TypeVar("Numeric", float, "np.ndarray", "float | np.ndarray")

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_LEAST_S = 1e-11  # no clock of ours tells less apart
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"\s*([0-9.]+)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def format_bytes(num_bytes: float) -> str:
    """Formats a size with a binary unit.

    >>> format_bytes(3 * 2**30)
    '3.00 GiB'
    """
    size = float(num_bytes)
    for unit in _BYTE_UNITS:
        if abs(size) < 1024 or unit == _BYTE_UNITS[-1]:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Formats a duration with a unit that suits its size.

    >>> format_seconds(0.00123), format_seconds(4321.0), format_seconds(1e-15)
    ('1.23 ms', '4,321 s', 'under 0.01 ns')
    """
    if 0 < abs(seconds) < _LEAST_S:
        return f"under {_LEAST_S / 1e-9:g} ns"
    for scale, unit in _SECOND_UNITS:
        rounded = float(f"{seconds / scale:.3g}")  # 999.6 µs are 1 ms
        if abs(rounded) >= 1:
            return f"{seconds / scale:,.0f} {unit}" if abs(rounded) >= 1000 else f"{rounded:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def parse_bytes(text: str | int | float) -> int:
    """Parses a size such as ``"40GB"``, ``"79.2GiB"`` or a plain number of bytes.

    >>> parse_bytes("1.5GiB")
    1610612736
    """
    if isinstance(text, int | float):
        return int(text)
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"cannot read {text!r} as a size: write a number with B, KB, MiB, GB, …")
    number, prefix, binary = match.groups()
    power = "kmgt".find(prefix.lower()) + 1 if prefix else 0
    return int(float(number) * (1024**power if binary else _DECIMAL[prefix.lower()]))
