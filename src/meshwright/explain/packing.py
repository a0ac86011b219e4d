"""Packs nested data with arrays into one line of text, equal for equal data, and unpacks it quickly."""

import base64
import binascii
import json
import zlib
from math import prod
from typing import Any

import numpy as np

_ARRAY = "\0array"  # marks an array's place in the JSON; the arrays' bytes follow it


def pack(data: Any) -> str:
    """Dicts with text keys, lists, numbers, text and arrays as text.

    >>> unpack(pack({"name": "x", "sizes": np.array([1, 2])}))
    {'name': 'x', 'sizes': array([1, 2])}
    """
    arrays: list[np.ndarray] = []
    head = json.dumps(_lift(data, arrays), separators=(",", ":"), ensure_ascii=False).encode()
    body = b"".join([len(head).to_bytes(8, "little"), head, *(a.tobytes() for a in arrays)])
    return base64.b64encode(zlib.compress(body, 6)).decode()


def unpack(text: str) -> Any:
    """What `pack` packed.

    Raises:
        ValueError: The text is damaged.
    """
    try:
        body = zlib.decompress(base64.b64decode(text, validate=True))
    except (zlib.error, binascii.Error) as error:
        raise ValueError(f"what the plan keeps of its search is damaged ({error})") from None
    size = int.from_bytes(body[:8], "little")
    place = 8 + size

    def lower(data: dict[str, Any]) -> Any:
        """Arrays are met in the order in which their bytes follow."""
        nonlocal place
        if _ARRAY not in data:
            return data
        stored, wanted, shape = data[_ARRAY]
        dtype, count = np.dtype(stored), prod(shape)
        found = np.frombuffer(body, dtype, count, place).reshape(shape)
        place += count * dtype.itemsize
        return found.astype(wanted)

    return json.loads(body[8 : 8 + size], object_hook=lower)


def _lift(data: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(data, np.ndarray):
        small = _narrow(data)
        arrays.append(small)
        return {_ARRAY: [small.dtype.str, data.dtype.str, list(data.shape)]}
    if isinstance(data, dict):
        return {key: _lift(value, arrays) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_lift(value, arrays) for value in data]
    return data


def _narrow(array: np.ndarray) -> np.ndarray:
    """Whole numbers in as few bytes as they need."""
    if array.dtype.kind != "i" or not array.size:
        return np.ascontiguousarray(array)
    narrow = np.result_type(*map(np.min_scalar_type, (array.min(), array.max())))
    return np.ascontiguousarray(array.astype(narrow) if narrow.kind in "iu" else array)
