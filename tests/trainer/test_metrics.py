"""Figures of a run: what a slow run says, and what stays in its log when it continues."""

import json
import struct
import sys
from types import ModuleType, SimpleNamespace

import pytest

from meshwright.errors import TrainingError
from meshwright.trainer.metrics import Meter, Planned, slower_than_planned
from meshwright.trainer.settings import read_settings
from meshwright.trainer.sinks import make_sinks


def test_a_run_that_is_slower_than_planned_says_where_the_time_goes():
    figures = {"step_s": 0.114, "planned_step_s": 0.1, "input_s": 0.0, "log_s": 0.0}
    assert slower_than_planned(figures) is None
    slow = slower_than_planned(figures | {"step_s": 0.12})
    assert slow.startswith("steps take 120 ms, 20% more than the planned 100 ms, in the step on the devices")
    starved = slower_than_planned(figures | {"step_s": 0.12, "input_s": 0.015})
    assert "15 ms of it waiting for data" in starved
    hooked = slower_than_planned(figures | {"step_s": 0.12, "log_s": 0.018})
    assert "18 ms of it in writing the log and what on_log calls" in hooked


def test_the_time_of_hooks_is_measured_apart_from_that_of_data_and_checkpoints():
    meter = Meter(Planned(1.0, 0.0, 0.0), tokens=8)
    meter.step()
    with meter.waiting("log"):
        pass
    meter.lose_input(0.5)
    figures = meter.mark()
    assert 0 < figures["log_s"] < figures["step_s"] and figures["input_s"] == 0.5 and figures["checkpoint_s"] == 0


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


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings = read_settings(None, {"model": "llama-tiny", "data": "x", "steps": 9, "log": {"wandb": "here"}})
    with pytest.raises(TrainingError, match=r"log.wandb needs wandb, which is not installed: pip install"):
        make_sinks(settings, 0)


def scalars(path):
    """What a file of TensorBoard holds: records of a length, its checksum, an event as protobuf, and its checksum."""
    data, found = path.read_bytes(), []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        assert data[8:12] == masked(data[:8]) and data[12 + size : 16 + size] == masked(data[12 : 12 + size])
        found += list(_scalars_of_event(data[12 : 12 + size]))
        data = data[16 + size :]
    return found


def masked(data):
    """A checksum bit by bit, as the format defines it; CRC-32C of 123456789 is known."""
    crc = castagnoli(data)
    return struct.pack("<I", ((crc >> 15 | (crc & 0x7FFF) << 17) + 0xA282EAD8) % 2**32)


def castagnoli(data):
    crc = 2**32 - 1
    for bit in (byte >> place & 1 for byte in data for place in range(8)):
        crc = crc >> 1 ^ 0x82F63B78 * ((crc ^ bit) & 1)
    return crc ^ 2**32 - 1


def _scalars_of_event(event):
    fields = dict(_fields(event))
    for number, value in _fields(fields.get(5, b"")):  # an event's summary, its values, their tags and numbers
        if number == 1:
            entry = dict(_fields(value))
            yield fields[2], entry[1].decode(), struct.unpack("<f", entry[2])[0]


def _fields(message):
    while message:
        key, message = _varint(message)
        if key % 8 == 0:
            value, message = _varint(message)
        else:
            size, message = {1: (8, message), 5: (4, message)}.get(key % 8) or _varint(message)
            value, message = message[:size], message[size:]
        yield key // 8, value


def _varint(message):
    value = shift = 0
    while True:
        byte, message = message[0], message[1:]
        value, shift = value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, message


def test_tensorboard_has_every_figure_of_every_line(tmp_path):
    log = {"tensorboard": str(tmp_path / "events")}
    _, to_board = make_sinks(read_settings(None, {"model": "llama-tiny", "data": "x", "steps": 9, "log": log}), 0)
    to_board(3, {"loss": 2.5, "tokens_per_s": 1000.0})
    to_board(6, {"loss": 1.5})
    (path,) = (tmp_path / "events").iterdir()
    assert castagnoli(b"123456789") == 0xE3069283
    assert scalars(path) == [(3, "loss", 2.5), (3, "tokens_per_s", 1000.0), (6, "loss", 1.5)]
    (tmp_path / "file").write_text("")
    log = {"tensorboard": str(tmp_path / "file" / "events")}
    with pytest.raises(TrainingError, match=r"log.tensorboard is .*events, which cannot be written: Not a directory"):
        make_sinks(read_settings(None, {"model": "llama-tiny", "data": "x", "steps": 9, "log": log}), 0)


def test_weights_and_biases_have_one_run_for_a_folder(tmp_path, monkeypatch):
    begun, logged = [], []
    wandb = ModuleType("wandb")
    wandb.init = lambda **options: (
        begun.append(options) or SimpleNamespace(log=lambda figures, step: logged.append((step, figures)))
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    given = {"model": "llama-tiny", "data": "x", "steps": 9, "log": {"wandb": "ships"}}
    for folder in (tmp_path / "one", tmp_path / "one", tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        *_, to_wandb = make_sinks(read_settings(None, given | {"folder": str(folder)}), 0)
        to_wandb(3, {"loss": 2.5})
    assert logged == [(3, {"loss": 2.5})] * 3
    assert [one["project"] for one in begun] == ["ships"] * 3 and begun[0]["config"]["steps"] == 9
    assert begun[0]["id"] == begun[1]["id"] != begun[2]["id"] and begun[0]["resume"] == "allow"
