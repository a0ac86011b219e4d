"""Settings of a run: read from TOML and keywords, and refused in one sentence."""

import pytest

from meshwright.errors import TrainingError
from meshwright.trainer.settings import read_settings

GIVEN = {"model": "llama-tiny", "data": "corpus", "steps": 10, "seq": 32, "batch_tokens": 64}


def test_keywords_replace_the_file_and_merge_with_its_tables(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(
        'model = "llama-tiny"\nsteps = 5\ndata = "here"\n[optimizer]\nname = "lion"\nlearning_rate = 0.1\n'
    )
    found = read_settings(config, {"steps": 7, "optimizer": {"learning_rate": 0.2}, "data": {"text": "body"}})
    assert (found.steps, found.data.path, found.data.text) == (7, "here", "body")
    assert (found.optimizer.name, found.optimizer.learning_rate) == ("lion", 0.2)


def test_a_path_takes_the_place_of_the_models_name_in_a_file_and_the_other_way_round(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('model = "llama-tiny"\nsteps = 5\ndata = "here"\n')
    found = read_settings(config, {"path": "weights"})
    assert (found.model, found.path) == (None, "weights")
    config.write_text('path = "weights"\nsteps = 5\ndata = "here"\n')
    found = read_settings(config, {"model": "llama-tiny"})
    assert (found.model, found.path) == ("llama-tiny", None)
    with pytest.raises(TrainingError, match="both are given: give one"):
        read_settings(config, {"model": "llama-tiny", "path": "weights"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 3}, "has an entry 'step'.*the nearest is 'steps'"),
        ({"optimizer": {"lerning_rate": 1.0}}, "optimizer has an entry 'lerning_rate'.*nearest is 'learning_rate'"),
        ({"steps": 0}, "settings.steps is 0 but must be at least 1"),
        ({"precision": "int8"}, "precision is 'int8' but must be one of bfloat16, float32"),
        ({"batch_tokens": 100}, "batch_tokens is 100, which seq = 32 does not divide; give a multiple, such as 96"),
        ({"lora": {"rank": "8"}}, "lora.rank is '8' but must be a whole number"),
        ({"data": 3}, "settings.data must be a table|data is 3"),
    ],
)
def test_what_cannot_be_is_named(change, message):
    with pytest.raises(TrainingError, match=message):
        read_settings(None, GIVEN | change)


def test_what_is_missing_is_named():
    with pytest.raises(TrainingError, match=r"settings.steps is missing"):
        read_settings(None, {"model": "llama-tiny", "data": "corpus"})


def test_a_file_that_is_none_is_named(tmp_path):
    with pytest.raises(TrainingError, match=r"none.toml cannot be read: No such file"):
        read_settings(tmp_path / "none.toml", {})
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(TrainingError, match=r"bad.toml is no TOML: .*line 1"):
        read_settings(tmp_path / "bad.toml", {})
