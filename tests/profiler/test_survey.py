"""Surveys as plain data, and what makes two machines different."""

import json
from dataclasses import replace

import pytest

from meshwright.profiler.survey import Survey, this_machine

from .surveys import MACHINE, survey


def test_a_survey_survives_json():
    made = survey()
    assert Survey.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize(
    "change",
    [
        {"format": 0},
        {"machine": None},
        {"machine": {"host": "here"}},
        {"readings": [{"what": "launch"}]},
        {"readings": 3},
        {"readings": [{"what": "launch", "amount": 0, "seconds": 0}]},
        {"readings": [{"what": "launch", "amount": 0, "seconds": float("nan")}]},
        {"memory_bytes": "much"},
        {"memory_bytes": 0},
    ],
    ids=str,
)
def test_what_is_no_survey_is_refused(change):
    with pytest.raises(ValueError):
        Survey.from_json(survey().to_json() | change)


@pytest.mark.parametrize("data", [None, [], 3, "x", {}])
def test_other_json_is_refused(data):
    with pytest.raises(ValueError):
        Survey.from_json(data)


def test_this_machine_is_what_jax_sees(monkeypatch):
    import jax

    monkeypatch.setenv("XLA_FLAGS", "--b --xla_dump_to=/tmp/x --a")
    found = this_machine()
    assert (found.platform, found.num_devices, found.jax) == ("cpu", jax.device_count(), jax.__version__)
    assert found.xla_flags == "--a --b"


def test_a_machine_was_busy_if_more_ran_than_it_has_cores():
    assert not survey().was_busy
    assert replace(survey(), load=2.5).was_busy
    assert not replace(survey(machine=replace(MACHINE, platform="gpu")), load=9.0).was_busy
