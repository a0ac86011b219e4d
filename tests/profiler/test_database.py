"""The file that keeps a survey: found again, replaced whole, and never in the way."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.profiler.database import cache_folder, load_survey, save_survey, survey_path

from .surveys import MACHINE, survey


def test_a_survey_is_found_again(tmp_path):
    folder = tmp_path / "not" / "yet"
    path = save_survey(folder, survey())
    assert path == survey_path(folder, MACHINE) and load_survey(folder, MACHINE) == survey()
    assert [file.name for file in folder.iterdir()] == [path.name]
    assert "here-cpu-1x8" in path.name
    assert {"date", "how", "machine", "readings"} <= json.loads(path.read_text()).keys()


@pytest.mark.parametrize(
    "change",
    [
        {"host": "there"},
        {"platform": "gpu"},
        {"device_kind": "NVIDIA H200"},
        {"num_processes": 2},
        {"devices_per_process": 4},
        {"num_cpus": 64},
        {"xla_flags": "--xla_cpu_multi_thread_eigen=false"},
        {"jax": "0.11.0"},
        {"jaxlib": "0.11.0"},
    ],
    ids=str,
)
def test_another_machine_has_another_file(tmp_path, change):
    save_survey(tmp_path, survey())
    assert load_survey(tmp_path, replace(MACHINE, **change)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}', "\x00\x01"])
def test_a_damaged_file_is_not_used_and_is_replaced(tmp_path, caplog, text):
    survey_path(tmp_path, MACHINE).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert load_survey(tmp_path, MACHINE) is None
    assert "measured again" in caplog.text
    save_survey(tmp_path, survey())
    assert load_survey(tmp_path, MACHINE) == survey()


def test_a_file_of_an_earlier_format_is_measured_anew(tmp_path, caplog):
    """Such as those that knew no convolutions."""
    old = survey().to_json() | {"format": 1}
    survey_path(tmp_path, MACHINE).write_text(json.dumps(old))
    assert load_survey(tmp_path, MACHINE) is None
    assert "format 1" in caplog.text and "measured again" in caplog.text


def test_a_foreign_file_is_not_used(tmp_path, caplog):
    other = survey(machine=replace(MACHINE, host="there"))
    survey_path(tmp_path, MACHINE).write_text(json.dumps(other.to_json()))
    assert load_survey(tmp_path, MACHINE) is None
    assert "another machine" in caplog.text


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert save_survey(tmp_path / "file" / "folder", survey()) is None
    assert load_survey(tmp_path / "file" / "folder", MACHINE) is None
    assert "cannot be kept" in caplog.text


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    save_survey(tmp_path, survey())

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        save_survey(tmp_path, survey(date="2027-01-01"))
    assert load_survey(tmp_path, MACHINE) == survey()
    assert len(list(tmp_path.iterdir())) == 1


def test_the_folder_follows_the_environment(monkeypatch):
    for name in ("MESHWRIGHT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder() == Path.home() / ".cache" / "meshwright"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/meshwright")
    monkeypatch.setenv("MESHWRIGHT_CACHE", "/mine")
    assert cache_folder() == Path("/mine")
