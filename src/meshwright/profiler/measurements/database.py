"""The database of measurements: one SQLite file that several processes may read and write at once.

Every measurement is committed as it is put, so that whatever was measured stays when a process is interrupted. A file
that is damaged, or that a later version of Meshwright wrote, is moved aside with a warning, and an empty one takes its
place: planning never fails because of it.
"""

import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.profiler.database import cache_folder
from meshwright.profiler.measurements.measurement import Key, Measurement
from meshwright.scratch import claimed

log = logging.getLogger(__name__)

VERSION = 1
FILE_NAME = "measurements.sqlite"
WAIT_S = 30.0  # for another process that writes

_KEY = [field.name for field in fields(Key)]
_REST = [field.name for field in fields(Measurement) if field.name != "key"]
_TABLE = f"""
CREATE TABLE IF NOT EXISTS measurements (
    {", ".join(f"{name} TEXT NOT NULL" for name in _KEY)},
    seconds REAL, memory_bytes INTEGER, kind TEXT NOT NULL, host TEXT NOT NULL, package TEXT NOT NULL,
    measured_at TEXT NOT NULL, failure TEXT NOT NULL,
    PRIMARY KEY ({", ".join(_KEY)}, kind)
) WITHOUT ROWID
"""


class DatabaseError(MeshwrightError):
    """A file of measurements that was asked for by name cannot be used."""


def open_database(path: str | os.PathLike[str] | None = None) -> "Database":
    """Opens the database of measurements, and creates it where there is none.

    Args:
        path: The file; ``measurements.sqlite`` in the user's cache directory by default. Where that directory cannot
            be written, measurements are kept in memory, with a warning.

    Raises:
        DatabaseError: The named file cannot be opened or created.
    """
    place = cache_folder() / FILE_NAME if path is None else Path(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # One process at a time checks and replaces the file: else two would move each other's new file aside.
        with claimed(place.with_name(f"{place.name}.lock")):
            return Database(_connect(place), place)
    except (OSError, sqlite3.OperationalError) as error:
        if path is not None:
            raise DatabaseError(f"{place} cannot be used for measurements: {error}; name another file") from error
        log.warning("measurements cannot be kept in %s (%s): they last as long as this process", place, error)
        return Database(_prepared(sqlite3.connect(":memory:", check_same_thread=False)), None)


def _connect(path: Path) -> sqlite3.Connection:
    try:
        return _checked_connection(path)
    except sqlite3.OperationalError:  # locked, or not to be opened: nothing is wrong with what it holds
        raise
    except sqlite3.DatabaseError as error:
        _move_aside(path, f"is damaged ({error})", "damaged")
    except _LaterVersion as later:
        _move_aside(path, f"was written by a later version of Meshwright ({later})", f"version-{later}")
    return _checked_connection(path)


class _LaterVersion(Exception):
    pass


def _checked_connection(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=WAIT_S, check_same_thread=False)
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise _LaterVersion(version)
        connection.execute("PRAGMA journal_mode=WAL")
        _prepared(connection)
        if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("its pages are inconsistent")
        connection.execute(f"SELECT {', '.join((*_KEY, *_REST))} FROM measurements LIMIT 1").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        if "no such column" in str(error):
            raise sqlite3.DatabaseError(str(error)) from error
        raise
    except BaseException:
        connection.close()
        raise
    return connection


def _prepared(connection: sqlite3.Connection) -> sqlite3.Connection:
    with connection:
        connection.execute(_TABLE)
        connection.execute(f"PRAGMA user_version={VERSION}")
    connection.text_factory = lambda raw: raw.decode(errors="replace")  # SQLite keeps any bytes as text
    return connection


def _move_aside(path: Path, why: str, word: str) -> None:
    target = path.with_name(f"{path.stem}.{word}{path.suffix}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.stem}.{word}-{number}{path.suffix}")
    os.replace(path, target)
    for ending in ("-wal", "-shm"):
        Path(f"{path}{ending}").unlink(missing_ok=True)
    log.warning("%s %s: it was moved to %s, and measurements begin anew", path, why, target)


class Database:
    """Measurements by key. Safe to use from several threads and processes."""

    def __init__(self, connection: sqlite3.Connection, path: Path | None):
        self.path = path
        self._connection = connection
        self._lock = threading.Lock()

    def __enter__(self) -> "Database":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Database({len(self)} measurements in {self.path or 'memory'})"

    def __len__(self) -> int:
        return int(self._run("SELECT COUNT(*) FROM measurements")[0][0])

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def put(self, measurement: Measurement) -> None:
        """Keeps a measurement, and replaces an earlier one of the same key and kind."""
        self.put_all([measurement])

    def put_all(self, measurements: Sequence[Measurement]) -> None:
        """Keeps several measurements, all or none."""
        marks = ", ".join("?" * len((*_KEY, *_REST)))
        rows = [(*astuple(m.key), *(getattr(m, name) for name in _REST)) for m in measurements]
        with self._lock, self._connection:
            self._connection.executemany(f"INSERT OR REPLACE INTO measurements VALUES ({marks})", rows)

    def keep(self, measurements: Sequence[Measurement]) -> None:
        """As `put_all`; where the file cannot be written, such as on a full disk, a warning says so and that is all."""
        try:
            self.put_all(measurements)
        except sqlite3.Error as error:
            log.warning(
                "a measurement cannot be kept in %s (%s): it is used now, and measured again later", self.path, error
            )

    def get(self, key: Key, kind: str | None = None) -> Measurement | None:
        """The measurement of a key; None where there is none. Of both kinds, the whole one is preferred."""
        rows = self.rows(kind=kind, **dict(zip(_KEY, astuple(key), strict=True)))
        return max(rows, key=lambda m: m.kind == "whole", default=None)

    def rows(self, **wanted: str | None) -> list[Measurement]:
        """The measurements whose columns have the given values, such as ``chip="h200"``, in the order of their keys."""
        where, values = _condition(wanted)
        order = ", ".join((*_KEY, "kind"))
        fetched = self._run(f"SELECT * FROM measurements{where} ORDER BY {order}", values)
        return list(self._legible(fetched))

    def _legible(self, rows: Sequence[Sequence[Any]]) -> Iterator[Measurement]:
        """Measurements of rows; SQLite keeps values of any type in any column, so each is checked."""
        for row in rows:
            try:
                yield Measurement.from_json(dict(zip((*_KEY, *_REST), row, strict=True)))
            except ValueError as error:
                log.warning("%s holds a row that cannot be read, which is not used: %s", self.path or "memory", error)

    def stale(self, key: Key) -> list[Measurement]:
        """Measurements that agree with a key in all but the compiler: they are reported, and never used."""
        wanted = dict(zip(_KEY, astuple(key), strict=True))
        compiler = wanted.pop("compiler")
        return [m for m in self.rows(**wanted) if m.key.compiler != compiler]

    def prune(self, *, before: str | None = None, other_than: str | None = None, **wanted: str | None) -> int:
        """Removes measurements, and returns how many.

        Args:
            before: Only those made before this time in UTC.
            other_than: Only those of other compilers than this one.
            **wanted: Only those with these values, as in `rows`.
        """
        where, values = _condition(wanted, before=before, other_than=other_than)
        with self._lock, self._connection:
            return self._connection.execute(f"DELETE FROM measurements{where}", values).rowcount

    def _run(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock:
            return self._connection.execute(statement, values).fetchall()


def _condition(
    wanted: dict[str, str | None], before: str | None = None, other_than: str | None = None
) -> tuple[str, list[str]]:
    unknown = [name for name in wanted if name not in (*_KEY, "kind", "host", "package")]
    if unknown:
        raise ValueError(f"measurements have no column {unknown[0]!r}")
    tests = {f"{name} = ?": value for name, value in wanted.items()}
    tests |= {"measured_at < ?": before, "compiler <> ?": other_than}
    given = {test: value for test, value in tests.items() if value is not None}
    return " WHERE " + " AND ".join(given) if given else "", list(given.values())
