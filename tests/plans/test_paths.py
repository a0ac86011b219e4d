"""Paths: exact names before globs, and hints that help."""

import pytest

from meshwright.plans.paths import match_paths, nearest

PATHS = ["state/params/0/kernel", "state/params/1/kernel", "state/params/0/bias", "batch/x", "batch/[a]", "batch/a"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("batch/x", ["batch/x"]),
        ("state/params/*/kernel", ["state/params/0/kernel", "state/params/1/kernel"]),
        ("state/*", ["state/params/0/kernel", "state/params/1/kernel", "state/params/0/bias"]),
        ("batch/?", ["batch/x", "batch/a"]),
        ("batch/[xa]", ["batch/x", "batch/a"]),
        ("*", PATHS),
        ("Batch/x", []),
        ("kernel", []),
        ("", []),
    ],
)
def test_globs_match_whole_paths(pattern, expected):
    assert match_paths(pattern, PATHS) == expected


def test_a_path_that_is_there_is_not_read_as_a_glob():
    assert match_paths("batch/[a]", PATHS) == ["batch/[a]"]
    assert match_paths("batch/[a]", [p for p in PATHS if p != "batch/[a]"]) == ["batch/a"]


def test_paths_may_come_from_an_iterator():
    assert match_paths("batch/*", iter(PATHS)) == ["batch/x", "batch/[a]", "batch/a"]


def test_the_hint_begins_with_the_likest_paths():
    assert nearest("state/params/0/kernle", PATHS).startswith("paths look like state/params/0/kernel, ")
    assert "batch/x" in nearest("bach/x", PATHS)


def test_the_hint_is_short():
    many = [f"state/params/{i}/kernel" for i in range(50)]
    assert nearest("state/params/*/weight", many).count("kernel") == 4


def test_a_pattern_like_nothing_is_shown_what_there_is():
    assert nearest("§§§", PATHS) == f"paths look like {', '.join(PATHS[:4])}"
    assert nearest("anything", []) == "the function has no arrays"


def test_a_name_is_found_as_a_screen_shows_it():
    assert match_paths(r"state/w\x1b[31m", ["state/w\x1b[31m", "state/w"]) == ["state/w\x1b[31m"]
