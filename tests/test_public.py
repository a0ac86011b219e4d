"""The public face: its exact names, and how little importing it costs."""

import doctest
import subprocess
import sys

import pytest

import meshwright as mw

NAMES = [
    "Auto",
    "CheckpointError",
    "ChoiceProblem",
    "Cluster",
    "ClusterError",
    "DataParallel",
    "DeviceOutOfMemory",
    "DoesNotFit",
    "Loop",
    "LoopNest",
    "Manual",
    "Mesh",
    "MeshwrightError",
    "OutputError",
    "Plan",
    "PlanFileError",
    "ProblemError",
    "ProcessError",
    "RuleError",
    "ServingError",
    "ShardingError",
    "SimulationError",
    "Slo",
    "Solution",
    "TensorParallel",
    "ThreeD",
    "TraceError",
    "Traffic",
    "TrainingError",
    "Zero",
    "batches",
    "boundary",
    "cluster",
    "compare",
    "create_state",
    "current_mesh",
    "explore",
    "find_blocks",
    "follow",
    "get_model",
    "initialize",
    "nest",
    "parallelize",
    "place_models",
    "plan",
    "plan_serving",
    "preempted",
    "reshard",
    "restore",
    "rule",
    "save",
    "saved_steps",
    "simulate",
    "solve",
    "train",
]

#: Packages whose names are used through the public one; they need extras.
FOLDERS = {"hf": ["Model", "Tokenizer", "load", "save"]}


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_public_names_are_these():
    assert mw.__all__ == NAMES
    for name in NAMES:
        assert getattr(mw, name) is not None
    assert dir(mw) == sorted([*NAMES, *FOLDERS, "__version__"])


def test_the_names_of_folders_are_these():
    pytest.importorskip("safetensors", reason="meshwright.hf needs the extra [hf]")
    pytest.importorskip("tokenizers", reason="meshwright.hf needs the extra [hf]")
    for folder, names in FOLDERS.items():
        assert getattr(mw, folder).__all__ == names


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = mw.nonsense


def test_every_error_is_one_of_ours():
    errors = [getattr(mw, name) for name in NAMES if name.endswith("Error") or name == "DoesNotFit"]
    assert all(issubclass(error, mw.MeshwrightError) for error in errors)


def test_importing_loads_neither_jax_nor_numba():
    assert run("import sys, meshwright; print(*(m for m in ('jax', 'numba', 'numpy') if m in sys.modules))") == []


def test_importing_changes_no_environment():
    code = "import os; before = dict(os.environ); import meshwright; print(dict(os.environ) == before)"
    assert run(code) == ["True"]


def test_reading_a_plan_loads_no_jax(tmp_path):
    import numpy as np

    mesh = mw.Mesh.abstract((4,), alpha=1, beta=1)
    path = tmp_path / "plan.json"
    mw.plan(lambda x, w: x @ w, np.ones((8, 4)), np.ones((4, 4)), mesh=mesh).save(path)
    code = (
        f"import sys, meshwright as mw; plan = mw.Plan.load({str(path)!r}); text = str(plan); "
        "assert 'x=4' in text; assert plan.cost.total >= 0; assert plan.mesh.shape == {'x': 4}; "
        "print(*(m for m in ('jax', 'numba') if m in sys.modules))"
    )
    assert run(code) == []


EXAMPLES = [
    name for name in NAMES if not (isinstance(getattr(mw, name), type) and issubclass(getattr(mw, name), Exception))
]


@pytest.mark.devices
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_public_name_has_an_example_that_runs(name):
    found = getattr(mw, name)
    tests = doctest.DocTestFinder(recurse=False).find(found, name, globs=dict(vars(sys.modules[found.__module__])))
    assert "    Examples:\n" in found.__doc__ and tests[0].examples, f"mw.{name} has no example in its docstring"
    outcome = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(tests[0])
    assert outcome.failed == 0
