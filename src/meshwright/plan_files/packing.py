"""Packs nested data with arrays into one line of text, equal for equal data, and unpacks it quickly."""

import base64
import binascii
import json
import zlib
from math import prod
from typing import Any

import numpy as np

from meshwright.output import ESCAPED

_KINDS = "biuf"  # of arrays: switches and numbers
_MOST_BYTES = 2**32  # a thousand times what the largest model's record has
_ARRAY = "\0array"  # marks an array's place in the JSON; the arrays' bytes follow it


def pack(data: Any) -> str:
    """Dicts with text keys, lists, numbers, text and arrays as text.

    >>> unpack(pack({"name": "x", "sizes": np.array([1, 2])}))
    {'name': 'x', 'sizes': array([1, 2])}
    """
    arrays: list[np.ndarray] = []
    head = json.dumps(_lift(data, arrays), separators=(",", ":"), ensure_ascii=False).encode("utf-8", ESCAPED)
    body = b"".join([len(head).to_bytes(8, "little"), head, *(a.tobytes() for a in arrays)])
    return base64.b64encode(zlib.compress(body, 6)).decode()


def unpack(text: str) -> Any:
    """The inverse of `pack`.

    Raises:
        ValueError: The text is damaged.
    """
    try:
        unpacking = zlib.decompressobj()
        body = unpacking.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    except (zlib.error, binascii.Error) as error:
        raise ValueError(f"what the plan keeps of its search is damaged ({error})") from None
    if not unpacking.eof:
        raise ValueError("what the plan keeps of its search is damaged (it ends early, or is larger than any of ours)")
    size = int.from_bytes(body[:8], "little")
    place = 8 + size

    def lower(data: dict[str, Any]) -> Any:
        """Replaces arrays, in the order in which their bytes follow."""
        nonlocal place
        if _ARRAY not in data:
            return data
        stored, wanted, shape = data[_ARRAY]
        dtype, count = np.dtype(stored), prod(shape)
        if dtype.kind not in _KINDS or np.dtype(wanted).kind not in _KINDS:
            raise ValueError(f"an array of {stored!r:.20} as {wanted!r:.20} is none that we write")
        array = np.frombuffer(body, dtype, count, place).reshape(shape)
        place += count * dtype.itemsize
        return array.astype(wanted)

    try:
        return json.loads(body[8 : 8 + size], object_hook=lower)
    except RecursionError:
        raise ValueError("what the plan keeps of its search is nested too deeply") from None


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
