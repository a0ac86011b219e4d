"""Measurements as plain JSON, so that a colleague's can be used."""

import os
from datetime import datetime
from pathlib import Path
from typing import Any

from meshwright.output import write_whole
from meshwright.profiler.measurements.database import VERSION, Database, DatabaseError
from meshwright.profiler.measurements.measurement import Key, Measurement
from meshwright.schema import parse_json

FORMAT = "meshwright measurements"


def to_json(database: Database, **wanted: str | None) -> dict[str, Any]:
    """The measurements as plain data; ``wanted`` as in `Database.rows`."""
    return {"format": FORMAT, "version": VERSION, "measurements": [m.to_json() for m in database.rows(**wanted)]}


def export_json(database: Database, path: str | os.PathLike[str], **wanted: str | None) -> int:
    """Writes the measurements to a file, and returns how many there are."""
    import json

    data = to_json(database, **wanted)
    write_whole(Path(path), json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    return len(data["measurements"])


def import_json(database: Database, path: str | os.PathLike[str]) -> tuple[int, int]:
    """Adds the measurements of a file; of two for one key, the later one is kept.

    Returns:
        How many were added, and how many were left out because the database has later ones.

    Raises:
        DatabaseError: The file holds no measurements; nothing was added.
    """
    try:
        imported = _measurements(parse_json(Path(path).read_bytes()))
    except ValueError as error:
        raise DatabaseError(f"{path} holds no measurements that can be used: {error}") from error
    latest: dict[tuple[Key, str], str] = {(m.key, m.kind): m.measured_at for m in database.rows()}
    new = [m for m in imported if m.measured_at > latest.get((m.key, m.kind), "")]
    database.put_all(new)
    return len(new), len(imported) - len(new)


def _measurements(data: Any) -> list[Measurement]:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("it was not written by `meshwright profile export`")
    version, rows = data.get("version"), data.get("measurements")
    if version != VERSION:
        raise ValueError(f"its version is {version!r} but this is version {VERSION}: use a matching Meshwright")
    if not isinstance(rows, list):
        raise ValueError("its measurements are no list; export them again")
    measurements = [Measurement.from_json(row) for row in rows]
    for one in measurements:
        _check_time(one.measured_at)
    return measurements


def _check_time(text: str) -> None:
    """Refuses what is no time: of two measurements the later one is kept."""
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"measured_at is {text!r:.60} but must be a time such as 2026-11-18T11:27:48+00:00") from None
