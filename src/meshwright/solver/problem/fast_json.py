"""Reads the contest's JSON fast: the big arrays of whole numbers in compiled code, the rest with json."""

import json
from typing import Any

import numpy as np

from meshwright.jit import kernel
from meshwright.solver.problem.validate import Ragged

_MARK = "\x00array"


def scan(text: bytes) -> Any:
    """The document with every array of arrays of whole numbers as a `Ragged`; None where only `json` can judge it.

    Anything unusual (fractions, other nesting, faults) gives None: the caller then reads with the standard library,
    whose messages name the fault.
    """
    data = np.frombuffer(text, dtype=np.uint8)
    begins, ends = find_arrays(data)
    pieces, last = [], 0
    for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        pieces += [text[last:begin], f'"\\u0000array{i}"'.encode()]
        last = int(end)
    try:
        document = json.loads(b"".join([*pieces, text[last:]]))
    except (ValueError, RecursionError):
        return None
    arrays = [_parse(data[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    if any(array is None for array in arrays):
        return None
    return _filled(document, arrays)


def _parse(data: np.ndarray) -> Ragged | None:
    size, lists = count_numbers(data)
    flat, first = np.empty(size), np.empty(lists + 1, dtype=np.int64)
    if not parse_numbers(data, flat, first):
        return None
    return Ragged(first, flat[: first[-1]])


def _filled(value: Any, arrays: list) -> Any:
    """The document with the marks replaced by the arrays."""
    if isinstance(value, dict):
        return {key: _filled(inner, arrays) for key, inner in value.items()}
    if isinstance(value, str) and value.startswith(_MARK):
        return arrays[int(value[len(_MARK) :])]
    return value


@kernel(interpretable=False)
def find_arrays(data):
    """Where every outermost array begins and ends."""
    begins, ends = np.empty(64, dtype=np.int64), np.empty(64, dtype=np.int64)
    count, depth, begin, quoted = 0, 0, 0, False
    i = 0
    while i < len(data) and count < 64:
        c = data[i]
        if quoted:
            if c == 92:  # a backslash escapes the next character
                i += 1
            elif c == 34:
                quoted = False
        elif c == 34:
            quoted = True
        elif c == 91:
            if depth == 0:
                begin = i
            depth += 1
        elif c == 93:
            depth -= 1
            if depth == 0:
                begins[count], ends[count] = begin, i + 1
                count += 1
        i += 1
    return begins[:count], ends[:count]


@kernel(interpretable=False)
def count_numbers(data):
    """At most how many numbers, and how many inner lists, an array of arrays holds."""
    commas, lists = 0, -1
    for c in data:
        commas += c == 44
        lists += c == 91
    return commas + 1, max(lists, 0)


@kernel(interpretable=False)
def parse_numbers(data, flat, first):
    """Parses [[n, ...], ...] with whole numbers below 2**63; returns False for anything else."""
    n, lists, depth, i = 0, 0, 0, 0
    expect_value = True  # after '[' or ','
    size = len(data)
    while i < size:
        c = data[i]
        if c == 32 or c == 10 or c == 13 or c == 9:
            i += 1
            continue
        if c == 91:
            if depth == 2 or not expect_value:
                return False
            depth += 1
            if depth == 2:
                first[lists] = n
                lists += 1
            i += 1
            after = _skip(data, i)
            expect_value = not (after < size and data[after] == 93)
        elif c == 93:
            if expect_value or depth == 0:
                return False
            depth -= 1
            i += 1
        elif c == 44:
            if expect_value or depth == 0:
                return False
            expect_value = True
            i += 1
        else:
            if depth != 2 or not expect_value:
                return False
            i, value, fine = _number(data, i)
            if not fine:
                return False
            flat[n] = value
            n += 1
            expect_value = False
            continue
    if depth != 0 or n > len(flat):
        return False
    first[lists] = n
    return lists == len(first) - 1


@kernel
def _skip(data, i):
    while i < len(data) and (data[i] == 32 or data[i] == 10 or data[i] == 13 or data[i] == 9):
        i += 1
    return i


@kernel
def _number(data, i):
    """One whole number; a following point, exponent or leading zero means that json must read it."""
    negative = data[i] == 45
    if negative:
        i += 1
    begin = i
    value = np.int64(0)
    while i < len(data) and 48 <= data[i] <= 57:
        value = value * 10 + (data[i] - 48)
        i += 1
    digits = i - begin
    if digits == 0 or digits > 18 + (digits == 19 and value > 0) or (digits > 1 and data[begin] == 48):
        return i, 0.0, False
    if i < len(data) and (data[i] == 46 or data[i] == 101 or data[i] == 69):
        return i, 0.0, False
    return i, -float(value) if negative else float(value), True
