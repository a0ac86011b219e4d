"""`meshwright blocks` and `meshwright profile`: what they print, and bad input."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from meshwright.cli.app import app
from meshwright.profiler.measurements import Key, Measurement, open_database, this_compiler


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def measured(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    key = Key("f00dfeed", "0:rows", "h200", "nvlink4", "bfloat16", this_compiler())
    found = Measurement(key, 1.5e-3, 2**30, "whole", "here", "0.1.0", "2026-11-18T04:00:00+00:00")
    with open_database() as database:
        failed = replace(found, key=replace(key, shardings="0:batch"), seconds=None, failure="out of memory")
        old = replace(found, key=replace(key, compiler="jaxlib 0.1"), measured_at="2020-01-01T00:00:00+00:00")
        database.put_all([found, replace(found, key=replace(key, shardings="0:columns"), seconds=1e-3), failed, old])
    return tmp_path


def test_blocks_print_as_json_and_as_a_table():
    found = run("blocks", "gpt-tiny", "--json")
    assert [s["space"] for s in json.loads(found.stdout)["segments"]] == ["3", "3·3·3·3", "3"]
    assert "blocks 5–8 like 1–4" in run("blocks", "gpt-tiny").stdout


def test_measurements_are_listed_with_the_best_of_each_segment(measured):
    text = run("profile", "list").stdout
    assert "f00dfeed" in text and "1 ms" in text and "jaxlib 0.1 (stale)" in text
    rows = json.loads(run("profile", "list", "--json", "--chip", "h200").stdout)["measurements"]
    assert len(rows) == 4
    assert (
        run("profile", "list", "--chip", "v4").stdout.split() == run("profile", "list", "--chip", "v5").stdout.split()
    )


def test_the_measurements_of_one_segment_are_shown_fastest_first(measured):
    text = run("profile", "show", "f00d").stdout
    assert text.index("0:columns") < text.index("0:rows") < text.index("0:batch")
    assert "out of memory" in text
    failed = run("profile", "show", "beef")
    assert failed.exit_code == 2 and "nothing was measured of segment beef" in failed.stderr


def test_measurements_are_exported_imported_and_pruned(measured, tmp_path, monkeypatch):
    assert "wrote 4 measurements" in run("profile", "export", str(tmp_path / "all.json")).stderr
    assert "removed 1 measurements, 3 are left" in run("profile", "prune", "--stale").stderr
    assert "removed 0 measurements" in run("profile", "prune", "--older-than", "2000").stderr
    assert "added 1 measurements; 3 left out" in run("profile", "import", str(tmp_path / "all.json")).stderr
    assert "removed 4 measurements, 0 are left" in run("profile", "prune", "--all").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prune",), "say what to remove"),
        (("import", "missing.json"), "there is no file missing.json; a colleague writes one"),
        (("import", "."), "is a folder; name a file"),
        (("prune", "--older-than", "999999999999"), "give a number of days from 0"),
        (("export", "no/such/folder.json"), "there is no folder"),
    ],
)
def test_bad_input_is_one_line(measured, arguments, message):
    found = run("profile", *arguments)
    assert found.exit_code == 2 and message in found.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--segment", "9"), "the model has segments 0 to 2"),
        (("--segment", "1", "--sample", "1"), "give at least 2 combinations"),
        (("--segment", "1", "--output", "no/such/page.html"), "there is no folder"),
    ],
)
def test_enumerations_that_cannot_be_made_are_refused(arguments, message):
    found = run("enumerate", "gpt-tiny", "--cluster", "1x8 h100", *arguments)
    assert found.exit_code == 2 and message in " ".join(found.stderr.split())


def test_too_many_combinations_ask_for_a_sample():
    found = run("enumerate", "moe-tiny", "--layers", "4", "--segment", "1", "--cluster", "1x8 h100")
    assert found.exit_code == 2 and "add --sample" in " ".join(found.stderr.split())


def test_the_passes_write_what_they_find(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "found"
    found = run("profile", "gpt-tiny", "--pass", "analysis", "--folder", str(folder))
    assert found.exit_code == 0 and "blocks 5–8 like 1–4" in found.stdout and "found in" in found.stdout
    assert {p.name for p in folder.iterdir()} == {"blocks.json"}
    found = run("profile", "mlp", "--pass", "analysis", "--folder", str(folder))
    assert found.exit_code == 2 and "holds blocks.json of gpt-tiny; choose another" in " ".join(found.stderr.split())
    found = run("profile", "mlp", "--pass", "analysis", "--folder", str(folder / "blocks.json" / "below"))
    assert found.exit_code == 2 and "name a folder that can be made" in " ".join(found.stderr.split())
    folder = tmp_path / "other"
    found = run("profile", "mlp", "--cluster", "1x8 h100", "--mesh", "8", "--folder", str(folder))
    assert found.exit_code == 0
    assert "no device here is a h100" in found.stdout and "TFLOP/s per device" in found.stdout
    assert {"blocks.json", "measurements.json", "strategies.json", "plan"} == {p.name for p in folder.iterdir()}
    assert {"plan.json", "program.txt"} <= {p.name for p in (folder / "plan").iterdir()}
    assert json.loads((folder / "strategies.json").read_text())["mesh"] == {"x": 8}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pass", "profiling"), "give one of analysis, profile, search"),
        (("--seconds", "0"), "give a time above 0"),
        (("--mesh", "3"), "mesh"),
    ],
)
def test_passes_that_cannot_be_run_are_refused(arguments, message):
    found = run("profile", "mlp", "--cluster", "1x8 h100", *arguments)
    assert found.exit_code == 2 and message in " ".join(found.stderr.split())


def test_a_plan_of_a_function_of_ones_own_asks_where_it_is(tmp_path):
    path = tmp_path / "plan.json"
    assert run("plan", "mlp", "--batch", "64", "--cluster", "1x2 h100", "--save", str(path)).exit_code == 0
    data = json.loads(path.read_text())
    data["provenance"]["model"] = "train_step"
    path.write_text(json.dumps(data))
    found = run("rehearse", str(path))
    assert found.exit_code == 2 and "--model module:train_step and --args" in " ".join(found.stderr.split())


def test_a_pipeline_is_rehearsed(tmp_path):
    path = str(tmp_path / "plan.json")
    recipe = ("--cluster", "1x2 cpu", "--recipe", "pipeline=2,microbatch=32")
    assert run("plan", "mlp", "--batch", "64", *recipe, "--save", path).exit_code == 0
    found = json.loads(run("rehearse", path, "--batch", "64", "--steps", "0", "--json", "-").stdout)
    assert [stage["flops"]["planned"] for stage in found["stages"]] == [
        stage["flops"]["compiled"] for stage in found["stages"]
    ]
    assert found["step_s"] > 0 and found["steps"] == 0
