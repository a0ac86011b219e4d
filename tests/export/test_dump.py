"""Dumps: every file is there and says what the plan says; compiled collectives are traced back to source lines."""

import csv
import json

import pytest

import meshwright as mw
from meshwright.export.compiled_collectives import trace_back
from meshwright.export.dump import FILES
from meshwright.export.program_files import PROGRAM_FILES
from meshwright.plan_files.storage import VERSION
from meshwright.runtime.checking.compiled import CompiledCollective
from tests.runtime.steps import CPU, batch, params, train_step


@pytest.fixture(scope="module")
def plan():
    return mw.plan(train_step, params(), batch(4096), cluster=CPU, mesh=(8,), method=mw.DataParallel())


@pytest.fixture(scope="module")
def folder(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("dump") / "new" / "folder"
    plan.dump(path)
    return path


def rows(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_file_is_there_and_said(plan, folder):
    readme = (folder / "README.txt").read_text()
    names = {*FILES, *PROGRAM_FILES} - {"stages.csv", "stages-memory.csv"}
    assert {p.name for p in folder.iterdir()} == names | {"README.txt", "plan.json", "compiled.txt", "after.txt"}
    assert all(name in readme for name in names)
    assert mw.Plan.load(folder / "plan.json") == plan


def test_files_say_what_the_plan_says(plan, folder):
    assert sum(float(r["seconds"]) for r in rows(folder / "collectives.csv")) == pytest.approx(plan.cost.communication)
    memory = rows(folder / "memory.csv")
    most = max(sum(int(v) for k, v in row.items() if k != "operation") for row in memory)
    assert most == pytest.approx(plan.memory.peak_bytes, abs=8)
    chosen = [r for r in rows(folder / "strategies.csv") if r["chosen"] == "True"]
    assert len(chosen) == len(plan.record.problem.nodes)
    program = (folder / "program.txt").read_text()
    assert "dot_general" in program and "steps.py" in program and "B_x" in program
    problem = mw.ChoiceProblem.load(folder / "problem.json.gz")
    assert mw.solve(problem, seconds=5, workers=1).cost <= plan.cost.total * (1 + 1e-9)


def test_compiled_collectives_are_traced_back(plan, folder):
    found = trace_back(plan, plan.verify().made, scatters=False)
    assert found.collectives and not found.unforeseen
    assert all("steps.py" in item.source and item.planned for item in found.collectives)
    assert "the plan foresaw all of them" in (folder / "after.txt").read_text()
    noted = [line for line in (folder / "compiled.txt").read_text().splitlines() if "// " in line]
    assert len(noted) == len(found.collectives)
    assert all("steps.py" in line and "; planned for gradient of" in line for line in noted)


def test_what_the_plan_did_not_foresee_is_marked(plan):
    added = CompiledCollective("all_to_all", ("x",), 1 << 20, 1, "all-to-all.1", "jit(f)/mul", "/there/mine.py:7")
    found = trace_back(plan, [added], scatters=False)
    assert found.unforeseen == found.collectives
    assert "! " in str(found) and "mine.py:7" in str(found) and "1 that the plan did not foresee" in str(found)


def test_a_loaded_plan_is_dumped_without_compiling(folder, tmp_path):
    mw.Plan.load(folder / "plan.json").dump(tmp_path)
    assert "does not know its function" in (tmp_path / "README.txt").read_text()
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == VERSION


def test_a_folder_that_cannot_be_made_is_said(plan, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(mw.OutputError, match=r"cannot write .*name a folder that can be made"):
        plan.dump(tmp_path / "file" / "folder")
