"""The benchmark of stage programs: each is compiled in a process of its own, and one that crashes costs one row."""

import importlib.util
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import meshwright as mw
from meshwright import zoo

pytestmark = pytest.mark.devices

RECIPE = {"data": 2, "pipeline": 2, "microbatch": 16}
CRASH = "import faulthandler, sys; faulthandler.enable(); print('compiling', file=sys.stderr); faulthandler._sigsegv()"


@pytest.fixture(scope="module")
def stage_programs():
    path = Path(__file__).parents[3] / "benchmarks" / "stage_programs.py"
    spec = importlib.util.spec_from_file_location("stage_programs", path)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.modules["stage_programs"] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    sys.path[:] = before
    yield module
    del sys.modules["stage_programs"]


@pytest.fixture
def row(stage_programs):
    return stage_programs.Row("mlp", "1x4 cpu", RECIPE, "", {"batch": 64})


@pytest.fixture(scope="module")
def plan():
    example = zoo.build("mlp", batch=64)
    args = example.train_step, example.state, example.batch
    return mw.plan(*args, cluster="1x4 cpu", method=mw.ThreeD(**RECIPE))


@pytest.fixture(scope="module")
def verified(plan):
    return plan.verify()


def test_a_process_compiles_one_program_of_a_saved_plan(stage_programs, row, plan, verified, tmp_path):
    plan.save(tmp_path / "plan.json")
    command = stage_programs.command(row, tmp_path / "plan.json", stage_programs.ALONE, ("backward", 1, 1))
    found = stage_programs.outcome(command, tmp_path / "backward")
    assert isinstance(found, dict), Path(found.rpartition(": ")[2]).read_text()
    assert stage_programs.Program.of(found).as_text().partition("\n")[0].startswith("HloModule jit_backward")
    assert found["output_size_in_bytes"] > 0
    assert not (tmp_path / "backward.txt").exists()


def test_a_crash_is_tried_alone_then_a_row_and_the_others_are_still_compared(
    stage_programs, row, plan, verified, tmp_path, monkeypatch
):
    def outcome(arguments, name):
        cluster, work, stage, place = arguments[-4:]
        if work == "backward" and (stage == "1" or cluster == stage_programs.WHOLE):
            return "crashed in XLA with signal 11: file.txt"
        return asdict(stage_programs.Program(verified.stages[int(stage)].texts[f"{work} {place}"]))

    monkeypatch.setattr(stage_programs, "outcome", outcome)
    first, second = stage_programs.compared(row, tmp_path, 2)
    expected = verified.stages[0]
    num = len(expected.texts)
    assert first[3:] == (0, f"{expected.bytes.ratio:.3f}", first[5], f"{expected.flops.ratio:.3f}", f"1 of {num}")
    assert second[3:] == (1, "crashed in XLA with signal 11: file.txt", "", "", "")


def test_what_crashes_fails_or_hangs_says_where(stage_programs, tmp_path):
    name = tmp_path / "program"
    crashed = stage_programs.outcome([sys.executable, "-c", CRASH], name)
    assert crashed == f"crashed in XLA with signal 11: {name}.txt"
    text = (tmp_path / "program.txt").read_text()
    assert "compiling" in text and "Segmentation fault" in text
    assert stage_programs.outcome([sys.executable, "-c", "raise SystemExit('no')"], name) == f"failed: {name}.txt"
    assert (tmp_path / "program.txt").read_text() == "no\n"
    hung = stage_programs.outcome([sys.executable, "-c", "import time; time.sleep(60)"], name, timeout_s=1)
    assert hung == f"not compiled in 1 s: {name}.txt"
