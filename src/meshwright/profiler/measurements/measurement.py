"""One measurement of a segment: what was measured, where, how, and what came out."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any, Literal, get_args

import meshwright
from meshwright.schema import Amount, Size, checked

Kind = Literal["whole", "rehearsed"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Key:
    """What a measurement is looked up by; a measurement is used only where all of it agrees.

    Attributes:
        fingerprint: The segment's.
        shardings: The strategies of the segment's operations and its boundary, as canonical text.
        chip: The chip's name in the catalogue, or JAX's name of the device.
        link: The links that collectives ran over; empty for a rehearsal, which runs none.
        dtype: The type of the segment's contractions.
        compiler: The version of jaxlib.
    """

    fingerprint: str
    shardings: str
    chip: str
    link: str
    dtype: str
    compiler: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured of one segment under one choice of shardings.

    Attributes:
        key: What was measured, and on what.
        seconds: The time of one run; None where it failed.
        memory_bytes: The peak of one device's memory; None where it is not known.
        kind: ``whole`` on all devices with collectives, or ``rehearsed`` as one device's share.
        host: The machine that measured.
        package: The version of Meshwright that measured.
        measured_at: When, in UTC.
        failure: Why it failed, in one line; empty where it did not. A failure is kept, so that it is not tried again.
    """

    key: Key
    seconds: Amount | None
    memory_bytes: Size | None
    kind: Kind
    host: str
    package: str
    measured_at: str
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data, the key's entries beside the others."""
        data = asdict(self)
        return data.pop("key") | data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Measurement":
        """The measurement of plain data.

        Raises:
            ValueError: The data is none; the message says where.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"a measurement is {data!r:.40} but must be a table")
        names = [field.name for field in (*fields(Key), *fields(cls)) if field.name != "key"]
        missing = [name for name in names if name not in data]
        if missing:
            raise ValueError(f"a measurement lacks {', '.join(missing)}")
        key = Key(**{field.name: data[field.name] for field in fields(Key)})
        rest = {field.name: data[field.name] for field in fields(cls) if field.name != "key"}
        return checked(cls(key=key, **rest), cls, "measurement")


def measured_now(
    key: Key, kind: Kind, seconds: float | None, memory_bytes: int | None = None, failure: str = ""
) -> Measurement:
    """A measurement that this machine has just made."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Measurement(key, seconds, memory_bytes, kind, platform.node(), meshwright.__version__, now, failure)


def this_compiler() -> str:
    """The version of the compiler that is installed here."""
    import jaxlib

    return f"jaxlib {jaxlib.__version__}"
