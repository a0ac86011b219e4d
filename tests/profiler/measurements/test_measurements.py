"""The database of measurements: found again by key, shared by processes, and never in the way."""

import json
import logging
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from meshwright.profiler.measurements import (
    DatabaseError,
    Key,
    Measurement,
    export_json,
    import_json,
    measured_now,
    open_database,
    this_compiler,
)
from meshwright.profiler.measurements.database import FILE_NAME, VERSION

KEY = Key("f00d", "0:rows 1:columns", "h200", "nvlink4", "bfloat16", "jaxlib 0.11.2")
FOUND = Measurement(KEY, 1.5e-3, 2**30, "whole", "here", "0.1.0", "2026-11-18T04:00:00+00:00")


@pytest.fixture
def database(tmp_path):
    with open_database(tmp_path / "some.sqlite") as found:
        yield found


def test_a_measurement_is_found_again_by_another_process(tmp_path):
    path = tmp_path / "not" / "yet" / "some.sqlite"
    with open_database(path) as database:
        database.put(FOUND)
    with open_database(path) as database:
        assert database.get(KEY) == FOUND
        assert repr(database) == f"Database(1 measurements in {path})"


def test_the_cache_folder_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    with open_database() as database:
        assert database.path == tmp_path / FILE_NAME


@pytest.mark.parametrize("name", ["fingerprint", "shardings", "chip", "link", "dtype", "compiler"])
def test_every_part_of_a_key_counts(database, name):
    database.put(FOUND)
    assert database.get(replace(KEY, **{name: "other"})) is None


def test_a_whole_measurement_is_preferred_and_a_new_one_replaces_the_old(database):
    rehearsed = replace(FOUND, kind="rehearsed", seconds=1.0)
    database.put(rehearsed)
    assert database.get(KEY) == rehearsed
    database.put(FOUND)
    assert database.get(KEY) == FOUND
    assert database.get(KEY, kind="rehearsed") == rehearsed
    database.put(replace(FOUND, seconds=2.0))
    assert database.get(KEY).seconds == 2.0
    assert len(database) == 2


def test_a_measurement_of_another_compiler_is_stale_and_not_used(database):
    old = replace(FOUND, key=replace(KEY, compiler="jaxlib 0.9.0"))
    database.put(old)
    assert database.get(KEY) is None
    assert database.stale(KEY) == [old]
    database.put(FOUND)
    assert database.stale(KEY) == [old]


def test_a_failure_is_kept(database):
    failed = measured_now(KEY, "rehearsed", None, failure="out of memory")
    database.put(failed)
    assert database.get(KEY) == failed
    assert failed.measured_at.endswith("+00:00") and failed.host


def test_rows_are_filtered_and_pruned(database):
    keys = [replace(KEY, fingerprint=f, chip=c) for f in ("a", "b") for c in ("h200", "v4")]
    database.put_all([replace(FOUND, key=key) for key in keys])
    assert [m.key.chip for m in database.rows(fingerprint="a")] == ["h200", "v4"]
    assert database.prune(chip="v4", fingerprint="b") == 1
    assert database.prune(before="2026-01-01") == 0
    assert database.prune(other_than=KEY.compiler) == 0
    assert database.prune(before="2027-01-01", chip="h200") == 2
    with pytest.raises(ValueError, match="no column 'seconds; DROP'"):
        database.rows(**{"seconds; DROP": "x"})
    assert len(database) == 1


DAMAGES = {
    "garbage": lambda path: path.write_bytes(b"this is no database" * 100),
    "empty header": lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(4000)),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:5000] + b"\xff" * 3000),
    "other columns": lambda path: _other_columns(path),
}


def _other_columns(path):
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE measurements (fingerprint TEXT)")
    connection.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_moved_aside_and_planning_goes_on(tmp_path, caplog, damage):
    path = tmp_path / FILE_NAME
    with open_database(path) as database:
        database.put_all([replace(FOUND, key=replace(KEY, fingerprint=f"{n:04}" * 50)) for n in range(200)])
        database._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    DAMAGES[damage](path)
    with caplog.at_level(logging.WARNING), open_database(path) as database:
        assert len(database) == 0
        database.put(FOUND)
        assert database.get(KEY) == FOUND
    assert "is damaged" in caplog.text
    assert (tmp_path / "measurements.damaged.sqlite").exists()


def test_a_file_of_a_later_version_is_moved_aside(tmp_path, caplog):
    path = tmp_path / FILE_NAME
    for number in (1, 2):
        with sqlite3.connect(path) as connection:
            connection.execute(f"PRAGMA user_version={VERSION + 7}")
        connection.close()
        with caplog.at_level(logging.WARNING), open_database(path) as database:
            assert len(database) == 0
        assert "was written by a later version of Meshwright (8)" in caplog.text
        path.unlink()
        names = {"measurements.version-8.sqlite", "measurements.version-8-2.sqlite"}
        assert len([p for p in tmp_path.iterdir() if p.name in names]) == number


def test_a_folder_that_cannot_be_written_costs_only_the_file(tmp_path, caplog, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING), open_database() as database:
        database.put(FOUND)
        assert database.get(KEY) == FOUND
        assert repr(database) == "Database(1 measurements in memory)"
    assert "last as long as this process" in caplog.text
    with pytest.raises(DatabaseError, match="cannot be used for measurements"):
        open_database(tmp_path / "file" / "some.sqlite")


WRITER = """
import sys
from dataclasses import replace
from meshwright.profiler.measurements import Key, Measurement, open_database
key = Key("", "", "h200", "", "f", "c")
for n in range(40):
    with open_database(sys.argv[1]) as database:
        key = replace(key, fingerprint=f"{sys.argv[2]}-{n}")
        database.put(Measurement(key, 1.0, 1, "whole", "here", "0", "2026"))
"""


def test_processes_write_at_once(tmp_path):
    path = tmp_path / "some.sqlite"
    path.write_bytes(b"damaged before all of them begin" * 100)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(n)], stderr=subprocess.DEVNULL) for n in range(3)
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    with open_database(path) as database:
        assert len(database) == 120
    assert len(list(tmp_path.glob("some.damaged*"))) == 1


@pytest.mark.parametrize(
    ("value", "words"),
    [("X'FF00'", r"measurement.key.chip is b'\xff\x00' but must be text"), ("CAST(X'FFFE' AS TEXT)", ""), ("7", "")],
)
def test_a_row_that_cannot_be_read_is_said_and_left_out(tmp_path, caplog, value, words):
    path = tmp_path / "some.sqlite"
    with open_database(path) as database:
        database.put_all([FOUND, replace(FOUND, key=replace(KEY, fingerprint="beef"))])
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(f"UPDATE measurements SET chip = {value} WHERE fingerprint = 'beef'")
    connection.close()
    with open_database(path) as database:
        assert FOUND in database.rows() and len(database.rows()) == (1 if words else 2)
    assert words in caplog.text


def test_threads_write_at_once(database):
    def write(name):
        for n in range(50):
            database.put(replace(FOUND, key=replace(KEY, fingerprint=f"{name}-{n}")))

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(database) == 200


def test_measurements_are_exchanged_as_json_and_later_ones_win(tmp_path):
    file = tmp_path / "mine.json"
    with open_database(tmp_path / "mine.sqlite") as mine, open_database(tmp_path / "theirs.sqlite") as theirs:
        mine.put_all([FOUND, replace(FOUND, kind="rehearsed"), replace(FOUND, key=replace(KEY, chip="v4"))])
        assert export_json(mine, file, chip="h200") == 2
        assert json.loads(file.read_text())["measurements"][0]["host"] == "here"
        theirs.put(replace(FOUND, host="there", measured_at="2026-12-01T00:00:00+00:00"))
        assert import_json(theirs, file) == (1, 1)
        assert theirs.get(KEY).host == "there"
        assert import_json(theirs, file) == (0, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "can be used"),
        ("[]", "was not written by"),
        ('{"format": "meshwright measurements", "version": 99, "measurements": []}', "its version is 99"),
        ('{"format": "meshwright measurements", "version": 1, "measurements": [{"chip": 1}]}', "lacks fingerprint"),
        ('{"format": "meshwright measurements", "version": 1, "measurements": [7]}', "can be used"),
    ],
)
def test_files_that_hold_no_measurements_are_refused(database, tmp_path, text, message):
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(DatabaseError, match=message):
        import_json(database, file)
    data = FOUND.to_json() | {"seconds": "fast"}
    with pytest.raises(ValueError, match="seconds"):
        Measurement.from_json(data)
    assert len(database) == 0


def test_the_compiler_is_named():
    assert this_compiler().startswith("jaxlib ")
