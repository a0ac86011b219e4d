"""Figures of a run: what a slow run says, and what stays in its log when it continues."""

import json

import pytest

from meshwright.trainer.metrics import slower_than_planned
from meshwright.trainer.settings import read_settings
from meshwright.trainer.sinks import make_sinks


def test_a_run_that_is_slower_than_planned_says_where_the_time_goes():
    figures = {"step_s": 0.114, "planned_step_s": 0.1, "input_s": 0.0}
    assert slower_than_planned(figures) is None
    slow = slower_than_planned(figures | {"step_s": 0.12})
    assert slow.startswith("steps take 120 ms, 20% more than the planned 100 ms, in the step on the devices")
    starved = slower_than_planned(figures | {"step_s": 0.12, "input_s": 0.015})
    assert "15 ms of it waiting for data" in starved


def test_lines_of_steps_that_run_again_are_dropped(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    settings = read_settings(None, {"model": "llama-tiny", "data": "x", "steps": 9, "folder": str(folder)})
    path = folder / "metrics.jsonl"
    path.write_text('{"step": 2, "loss": 3.0}\n{"step": 4, "loss": 2.0}\n{"step": 6, "lo')
    _, to_lines = make_sinks(settings, 2)
    to_lines(4, {"loss": 1.0})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 2, "loss": 3.0},
        {"step": 4, "loss": 1.0},
    ]


def test_the_terminal_shows_figures_with_their_units_and_those_of_hooks(tmp_path, capsys):
    settings = read_settings(None, {"model": "llama-tiny", "data": "x", "steps": 9})
    (to_terminal,) = make_sinks(settings, 0)
    to_terminal(
        3, {"loss": 2.5, "step_s": 0.05, "tokens_per_s": 12345.6, "mfu": 0.412, "input_s": 0.01, "accuracy": 0.5}
    )
    line = capsys.readouterr().out
    assert line == (
        "step 3: loss 2.50000, 50 ms a step, 12,346 tokens/s, MFU 41.2%, 10 ms lost to input and checkpoints, "
        "accuracy 0.5\n"
    )


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_library_that_is_not_installed_is_named(name, monkeypatch):
    from meshwright.errors import TrainingError

    monkeypatch.setitem(__import__("sys").modules, {"tensorboard": "tensorboardX"}.get(name, name), None)
    settings = read_settings(None, {"model": "llama-tiny", "data": "x", "steps": 9, "log": {name: "here"}})
    with pytest.raises(TrainingError, match=f"log.{name} needs .*, which is not installed: pip install"):
        make_sinks(settings, 0)
