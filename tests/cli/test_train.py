"""`meshwright train`: settings of the command line, and errors as one line."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import meshwright as mw
from meshwright.cli.app import app
from meshwright.cli.console import CommandError
from meshwright.cli.train import has_launcher, overrides


def test_settings_are_read_as_toml_or_as_text():
    found = overrides(["steps=3", "data.path=gs://bucket/x", "lora.targets=['q', 'v']", "data.text=body"])
    assert found == {
        "steps": 3,
        "data": {"path": "gs://bucket/x", "text": "body"},
        "lora": {"targets": ["q", "v"]},
    }


@pytest.mark.parametrize("text", ["steps", "=3", "a b=3", "data..path=x"])
def test_settings_that_are_none_are_refused(text):
    with pytest.raises(CommandError, match="write NAME=VALUE"):
        overrides([text])
    with pytest.raises(CommandError, match="within a setting that --set gives as a whole"):
        overrides(["data=x", "data.path=y"])


def test_launchers_are_known_by_their_variables():
    assert has_launcher({"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234"}) and has_launcher({"SLURM_NTASKS": "4"})
    assert not has_launcher({}) and not has_launcher({"SLURM_NTASKS": "1"})


def test_a_mistake_is_one_line_and_exit_code_two(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('model = "llama-tiny"\ndata = "nowhere"\nstep = 3\n')
    result = CliRunner().invoke(app, ["train", str(config)])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and "the nearest is 'steps'" in result.stderr


@pytest.mark.parametrize(("is_complete", "code"), [(True, 0), (False, 143)])
def test_a_run_that_was_asked_to_end_says_so_to_its_scheduler(is_complete, code, tmp_path, monkeypatch):
    ended = SimpleNamespace(is_complete=is_complete, step=7)
    monkeypatch.setattr(mw, "train", lambda config, **settings: ended, raising=False)
    (tmp_path / "run.toml").write_text('model = "llama-tiny"\ndata = "nowhere"\nsteps = 3\n')
    result = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml")])
    assert result.exit_code == code and ("saved after step 7" in result.stderr) == (not is_complete)
