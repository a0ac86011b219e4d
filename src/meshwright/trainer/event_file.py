"""Writes scalars as TensorBoard reads them: records with checksums, each an event as protocol buffers encode it.

The format is that of TensorFlow: a record is its length, a checksum of that, the event and a checksum of it
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details); an event has the time (field 1), the
step (2) and a summary (5) of values with a tag (1) and a number (2), as in `event.proto` and `summary.proto`.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_CASTAGNOLI = 0x82F63B78  # the polynomial of the checksums, its bits reversed
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # how the value of a field is encoded


class EventFile:
    """A file of its own in a folder, which TensorBoard shows as one run with the others there.

    Each line of figures is on disk when `write` returns, so that a run that is killed loses none.

    Raises:
        OSError: The folder or the file cannot be written.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self._path = folder / f"events.out.tfevents.{int(now):010}.{socket.gethostname()}.{os.getpid()}"
        self._append(_field(1, _DOUBLE, struct.pack("<d", now)) + _text(3, b"brain.Event:2"))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Adds figures of a step."""
        values = (
            _text(1, _text(1, name.encode()) + _field(2, _FLOAT, struct.pack("<f", value)))
            for name, value in figures.items()
        )
        when = _field(1, _DOUBLE, struct.pack("<d", time.time())) + _field(2, _VARINT, _varint(step))
        self._append(when + _text(5, b"".join(values)))

    def _append(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        with self._path.open("ab") as file:
            file.write(length + _checksum(length) + event + _checksum(event))


def _field(number: int, kind: int, value: bytes) -> bytes:
    return _varint(number << 3 | kind) + value


def _text(number: int, value: bytes) -> bytes:
    return _field(number, _BYTES, _varint(len(value)) + value)


def _varint(number: int) -> bytes:
    """Seven bits in each byte, the lowest first; all bytes but the last have their highest bit."""
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def _checksum(data: bytes) -> bytes:
    """CRC-32C, turned and shifted so that a checksum of data with checksums in it is a good one as well."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _of_byte(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_CASTAGNOLI if byte & 1 else 0)
    return byte


_TABLE = [_of_byte(byte) for byte in range(256)]
