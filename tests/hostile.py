"""Damaged and hostile files, the same in every run: what `test_hostile.py` holds every reader against."""

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

DEEP = 200_000  # brackets: more than any parser's stack
WRONG = (None, True, "text", "", -1, 0, 3, 1.5, -1e308, 1e308, 10**30, float("nan"), float("inf"), [], {}, [[]], [None])
NAMES = ("[/x]", "\x1b[2J", "<!--<script>", "../../etc/passwd", "\ud800", "a" * 10_000)
STRUCTURES = (
    {"node": "subprocess:call", "named": True, "keys": ["args"], "items": [{"list": [{"leaf": 0}]}]},
    {"node": "builtins:exec", "named": True, "keys": ["x"], "items": [{"leaf": 0}]},
    {"node": "antigravity:Pair", "named": True, "keys": ["x"], "items": [{"leaf": 0}]},
    {"leaf": 10**6},
)


def damaged_bytes(content: bytes, seed: int, number: int) -> Iterator[tuple[str, bytes]]:
    """Truncations, flipped and replaced bytes, and what is no such file at all."""
    draw = random.Random(seed)
    yield "empty", b""
    yield "not text", b"\xff\xfe\x00\xd8" * 16
    yield "deep lists", b"[" * DEEP
    yield "deep tables", b'{"a":' * DEEP
    yield "deep within", content[: len(content) // 3] + b"[" * DEEP
    yield "twice", content + content
    for _ in range(number):
        place = draw.randrange(len(content))
        raw = bytearray(content)
        raw[place] ^= 1 << draw.randrange(8)
        yield f"flipped at {place}", bytes(raw)
        yield f"ended at {place}", content[:place]
        raw[place : place + 8] = bytes(draw.randrange(256) for _ in range(8))
        yield f"noise at {place}", bytes(raw)


def damaged_data(data: Any, seed: int, number: int) -> Iterator[tuple[str, Any]]:
    """The same plain data with one entry replaced by something wrong, left out or doubled."""
    draw = random.Random(seed)
    for _ in range(number):
        holder, key, path = _somewhere(data, draw)
        if holder is None:
            continue
        kept = list(holder) if isinstance(holder, list) else dict(holder)
        how = draw.choice(("replace", "replace", "replace", "leave out", "name", "more"))
        if how == "replace":
            value = draw.choice(WRONG)
            _set(holder, key, value)
            what = repr(value)
        elif how == "leave out":
            del holder[key]
            what = "left out"
        elif how == "name":
            name = draw.choice(NAMES)
            _set(holder, key, name)
            what = f"{name!r:.20}"
        elif isinstance(holder, dict):
            holder[draw.choice(NAMES)] = draw.choice(WRONG)
            what = "more keys"
        else:
            holder.append(draw.choice(WRONG))
            what = "one more"
        yield f"{'/'.join(map(str, path))}: {what}", data
        holder.clear()
        holder.update(kept) if isinstance(holder, dict) else holder.extend(kept)


def _set(holder: Any, key: Any, value: Any) -> None:
    """Into an array only what is as large: a file that says otherwise is not made by `pack` at all."""
    holder[key] = value


def _somewhere(data: Any, draw: random.Random) -> tuple[Any, Any, list[Any]]:
    """A container, one of its keys, and the path there; deep places are as likely as others of their depth."""
    path: list[Any] = []
    holder, key = None, None
    while isinstance(data, dict | list) and data:
        holder = data
        key = draw.choice(list(data)) if isinstance(data, dict) else draw.randrange(len(data))
        path.append(key)
        data = data[key]
        if draw.random() < 0.25:
            break
    return holder, key, path


def damaged_arrays(data: Any, seed: int, number: int) -> Iterator[tuple[str, Any]]:
    """The same data with one array changed: an entry out of range, another length, another type."""
    draw = random.Random(seed)
    places = list(_arrays(data, []))
    for _ in range(number):
        holder, key, path = draw.choice(places)
        array = holder[key]
        how = draw.choice(("large", "negative", "short", "long", "float", "text"))
        changed = array.copy()
        if how in ("large", "negative") and array.size and array.dtype.kind in "if":
            changed.reshape(-1)[draw.randrange(array.size)] = 10**9 if how == "large" else -7
        elif how == "short":
            changed = array[:-1]
        elif how == "long":
            changed = np.concatenate([array, array[:1]])
        elif how == "float":
            changed = array.astype(np.float64) + 0.5
        else:
            changed = np.zeros((2, *array.shape), array.dtype)
        holder[key] = changed
        yield f"{'/'.join(map(str, path))}: {how}", data
        holder[key] = array


def _arrays(data: Any, path: list[Any]) -> Iterator[tuple[Any, Any, list[Any]]]:
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        if isinstance(value, np.ndarray):
            yield data, key, [*path, key]
        else:
            yield from _arrays(value, [*path, key])


def as_text(data: Any) -> bytes:
    return json.dumps(data).encode()
