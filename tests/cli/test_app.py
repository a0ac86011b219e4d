"""The command line: every command, and every kind of bad input."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import meshwright
from meshwright.cli.app import app
from meshwright.cli.console import CommandError
from meshwright.cli.options import spelled_out
from meshwright.cli.request import parse_pipeline

pytestmark = pytest.mark.slow

OWN_MODULE = """
import jax
import jax.numpy as jnp

def loss(weights, x):
    return jnp.mean(jnp.square(x @ weights))

def step(weights, x):
    value, gradient = jax.value_and_grad(loss)(weights, x)
    return weights - 0.1 * gradient, value

arguments = (jax.ShapeDtypeStruct((512, 512), "float32"), jnp.ones((64, 512)))
not_arguments = {"weights": 1}
real_arguments = (jnp.ones((16, 16)), jnp.ones((8, 16)))
wrong_arguments = (jnp.ones(3), jnp.ones(4))

def make_arguments():
    print("making arguments")
    return arguments

def broken_arguments():
    raise RuntimeError("no data here")
"""


def run(*args, code=0):
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, (result.exception, result.output)
    return result


def refuse(*args):
    """Runs a command that must be refused; returns its message, which is one line."""
    result = run(*args, code=2)
    lines = [line for line in result.stderr.splitlines() if line.startswith("meshwright")]
    assert len(lines) == 1 and result.stdout == "" and "Traceback" not in result.output
    return lines[0]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a user's module `mine`, as the working directory."""
    (tmp_path / "mine.py").write_text(OWN_MODULE)
    (tmp_path / "faulty.py").write_text("x = 1\nraise ValueError('bad day')\n")
    (tmp_path / "unclosed.py").write_text("x = (1\n")
    (tmp_path / "needy.py").write_text("import a_package_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mine", "faulty", "unclosed", "needy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_version():
    assert run("--version").stdout == f"meshwright {meshwright.__version__}\n"


def test_it_runs_as_a_module():
    found = subprocess.run([sys.executable, "-m", "meshwright", "--version"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, f"meshwright {meshwright.__version__}\n")


def test_help_loads_neither_jax_nor_numba():
    code = "import sys, meshwright.cli; print([m for m in ('jax', 'numba', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_models_are_listed():
    text = run("models").stdout
    assert re.search(r"llama2-13b\s+llama\s+13\.02 B\s+40\s", text)
    rows = json.loads(run("models", "--json").stdout)
    assert {"name", "family", "num_params", "batch", "seq", "shape", "source"} <= rows[0].keys()
    assert "llama2-13b" in {row["name"] for row in rows}


def test_chips_are_listed():
    text = run("chips").stdout
    assert re.search(r"a100-sxm-40gb\s+39\.50 GiB\s+1,555\s+312\s+156\s+nvlink3 300\s+infiniband 25", text)
    rows = json.loads(run("chips", "--json").stdout)
    assert all(figure["source"] for row in rows for figure in row["figures"])


def test_this_machine_is_measured_and_shown(tmp_path, monkeypatch):
    from profiler.surveys import survey  # of the tests

    from meshwright.profiler import local
    from meshwright.profiler import measure as measure_module
    from meshwright.rehearsal.learning import class_probes

    assert "MESHWRIGHT_MEASURE=never" in refuse("measure")
    monkeypatch.setenv("MESHWRIGHT_MEASURE", "once")
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(local, "_known", {})
    monkeypatch.setattr(measure_module, "measure", lambda machine, say: survey(machine=machine))
    monkeypatch.setattr(class_probes, "probes", lambda platform, num_devices: [])  # `tests/rehearsal` measures those
    result = run("measure")
    assert re.search(r"products, float32\s+4 GFLOP/s", result.stdout)
    assert re.search(r"all-reduce\s+8\s+one process\s+100 µs\s+1\s+1\.15 ms", result.stdout)
    assert "kept in" in result.stderr and "were running" not in result.stderr
    assert json.loads(run("measure", "--json").stdout)["date"] == "2026-01-02"
    monkeypatch.setattr(measure_module, "measure", lambda machine, say: survey(machine=machine, date="2027-01-01"))
    assert "2026-01-02" in run("measure").stdout
    assert "2027-01-01" in run("measure", "--again").stdout


def test_one_chip_is_shown_with_its_sources():
    text = run("chips", "h100").stdout
    assert "h100-sxm-80gb (NVIDIA)" in text and "memory_bandwidth" in text and "vendor" in text
    assert json.loads(run("chips", "h100", "--json").stdout)["name"] == "h100-sxm-80gb"
    assert "unknown chip 'h1000'" in refuse("chips", "h1000")


def test_plan_of_a_zoo_model_is_printed_with_progress():
    result = run("plan", "mlp", "--cluster", "2x4 a100-40gb", "--mesh", "2x4", "--batch", 512)
    assert "Auto on mesh x=2 × y=4" in result.stdout and "state/params/layers/*/kernel" in result.stdout
    assert "tracing" in result.stderr and "pricing mesh 2×4" in result.stderr


def test_plan_saved_and_shown_again(tmp_path):
    saved, written = tmp_path / "plan.json", tmp_path / "out.json"
    first = run("plan", "mlp", "--cluster", "8 a100-40gb", "--mesh", "8", "--save", saved, "--json", written)
    assert saved.read_text() == written.read_text()
    assert f"saved {saved}" in first.stderr and f"wrote {written}" in first.stderr
    assert without_seconds(run("show", saved).stdout) == without_seconds(first.stdout)


def without_seconds(text):
    """A printed plan without the time it took, which is not saved with it."""
    return [re.sub("; solved in .*", "", line).split() for line in text.splitlines()]


def test_json_to_stdout_is_json_and_nothing_else():
    result = run("plan", "gpt-tiny", "--cluster", "4 h100", "--mesh", "2x2", "--layers", 1, "--seq", 16, "--json", "-")
    data = json.loads(result.stdout)
    assert data["format"] == "meshwright-plan" and data["mesh"]["shape"] == [2, 2] and data["step_s"] > 0


@pytest.mark.parametrize("method", ["auto", "data", "zero1", "zero2", "zero3", "tensor"])
def test_every_method_plans(method):
    result = run("plan", "mlp", "--cluster", "2x2 a100-40gb", "--method", method, "--json", "-")
    names = {
        "data": "DataParallel",
        "zero1": "Zero-1",
        "zero2": "Zero-2",
        "zero3": "Zero-3",
        "tensor": "TensorParallel",
    }
    assert json.loads(result.stdout)["method"] == names.get(method, "Auto")


def test_methods_are_compared():
    result = run("compare", "mlp", "--cluster", "1x8 h100", "--methods", "auto,zero3", "--batch", 64)
    lines = result.stdout.splitlines()
    assert lines[0].strip() == "methods: predicted" and [line.split()[0] for line in lines[2:]] == ["Auto", "Zero-3"]
    assert "planning by Zero-3" in result.stderr


def test_methods_are_compared_as_json_and_run(own):
    options = ("--args", "mine:real_arguments", "--cluster", "1x8 cpu", "--methods", "data", "--steps", 1)
    result = run("compare", "mine:step", *options, "--json", "-")
    data = json.loads(result.stdout)
    assert data["steps"] == 1 and data["rows"][0]["method"] == "DataParallel" and data["rows"][0]["measured_s"] > 0


def test_methods_that_fit_with_recomputation_only_are_compared_with_it():
    options = ("--cluster", "1x2 h100", "--methods", "data", "--batch", 2**18, "--seq", 64, "--layers", 8)
    options = (*options, "--microbatches", 1)
    result = run("compare", "llama-tiny", *options)
    assert result.stdout.splitlines()[2].split()[:2] == ["DataParallel", "2"]


def test_methods_that_are_none_are_refused():
    message = refuse("compare", "mlp", "--methods", "auto,best")
    assert "--methods: method is 'best'; give one of 'auto', 'data', 'zero1'" in message
    assert "--methods: methods is ','; give some of" in refuse("compare", "mlp", "--methods", ",")
    assert "--steps is -1" in refuse("compare", "mlp", "--steps", "-1")


def test_scan_and_forced_checkpointing_are_passed_on():
    result = run("plan", "gpt-tiny", "--cluster", "2 h100", "--mesh", "2", "--scan", "--checkpoint", "--json", "-")
    data = json.loads(result.stdout)
    assert "state/params/layers/up" in {tensor["path"] for tensor in data["arguments"]}
    assert any("rematted" in op[1] for op in data["ops"])


def test_options_of_the_zoo_and_names_of_axes_are_passed_on():
    options = ("--cluster", "2x2 h100", "--mesh", "data=2, model=2", "--layers", 1, "--seq", 32)
    one = ("--microbatches", 1, "--recompute", "as written")
    fused, plain, single = (
        json.loads(run("plan", "gpt-tiny", *options, *chosen, *one, "--checkpoint", "selective", "--json", "-").stdout)
        for chosen in (("--attention", "fused"), ("--attention", "plain"), ("--option", "dtype=float32"))
    )
    assert fused["mesh"]["axis_names"] == ["data", "model"]
    labels = [{op[1] for op in found["ops"]} for found in (fused, plain, single)]
    assert [any("dot_product_attention" in label for label in own) for own in labels] == [True, False, False]
    assert any("takes bfloat16 and float16, not float32" in remark for remark in single["remarks"])


def test_pipelines_are_planned_and_shown(tmp_path):
    recipe = "data=2,tensor=1,pipeline=2,microbatch=2,schedule=zb-h1,checkpoint=full"
    path = tmp_path / "plan.json"
    result = run("plan", "mlp", "--cluster", "2x2 h100", "--batch", 32, "--recipe", recipe, "--save", path)
    assert "2 stages, zb-h1, 8 microbatches" in result.stdout
    assert "ThreeD(2×1×2)" in run("show", path).stdout
    found = run("plan", "mlp", "--cluster", "2x1 h100", "--batch", 8, "--pipeline", "--json", "-")
    assert json.loads(found.stdout)["method"] == "Auto"


TIGHT = ("plan", "mlp", "--cluster", "1 a100-40gb", "--batch", 4096, "--layers", 12, "--memory-fraction")


def test_recomputation_is_planned_when_nothing_else_fits():
    plain, full = (
        json.loads(run(*TIGHT, 0.9, "--recompute", word, "--json", "-").stdout)["memory"]["peak_bytes"]
        for word in ("none", "full")
    )
    assert full < plain
    fraction = (plain + full) / 2 / meshwright.cluster("1 a100-40gb").memory_bytes
    whole = ("--microbatches", 1)
    found = json.loads(run(*TIGHT, fraction, *whole, "--json", "-").stdout)
    assert found["recompute"] not in ("none", "as written") and full <= found["memory"]["peak_bytes"] < plain
    assert "no plan fits" in refuse(*TIGHT, fraction, *whole, "--recompute", "none")
    message = refuse(*TIGHT, fraction / 100, *whole)
    assert "no plan fits" in message and "more devices" in message


def test_an_unknown_recomputation_is_refused():
    assert "did you mean 'selective'?" in refuse("plan", "mlp", "--recompute", "selectiv")


def test_microbatches_are_decided_or_given():
    whole, decided, given = (
        json.loads(run(*TIGHT, 0.9, *options, "--json", "-").stdout)
        for options in (("--microbatches", 1), (), ("--microbatches", 2))
    )
    assert [plan["microbatches"] for plan in (whole, decided, given)] == [1, 1, 2]
    fraction = 0.8 * whole["memory"]["peak_bytes"] / meshwright.cluster("1 a100-40gb").memory_bytes
    kept = json.loads(run(*TIGHT, fraction, "--recompute", "none", "--json", "-").stdout)
    assert kept["microbatches"] > 1
    assert "--microbatches is 'few'; give a whole number" in refuse(*TIGHT, 0.9, "--microbatches", "few")


@pytest.mark.parametrize("args", ["mine:arguments", "mine:make_arguments"])
def test_a_function_of_ones_own_is_planned(own, args):
    result = run("plan", "mine:step", "--args", args, "--cluster", "4 a100-40gb", "--mesh", "4", "--json", "-")
    assert [t["path"] for t in json.loads(result.stdout)["arguments"]] == ["weights", "x"]


def test_the_example_of_ones_own_function_plans(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2] / "examples")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    run("plan", "train:train_step", "--args", "train:example_args", "--cluster", "2x8 h100", "--mesh", "16")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan", "gpt-tinny"], "Did you mean 'gpt-tiny'"),
        (["plan", "gpt-tinny"], "For a function of your own write module:function with --args"),
        (["plan", "mlp", "--cluster", "2x4 a1000"], "unknown chip 'a1000'"),
        (["plan", "mlp", "--cluster", "lots"], "cannot read cluster 'lots': write 'HOSTSxDEVICES CHIP'"),
        (["plan", "mlp", "--cluster", "nowhere.toml"], "nowhere.toml"),
        (["plan", "mlp", "--cluster", "2x4 a100", "--mesh", "3x4"], "mesh (3, 4) has 12 devices but cluster"),
        (["plan", "mlp", "--cluster", "2x4 a100", "--mesh", "two"], "--mesh is 'two'; write the sizes of its axes"),
        (["plan", "mlp", "--cluster", "2x4 a100", "--mesh", "a=2,a=4"], "or their names and sizes, each once: data=50"),
        (["plan", "mlp", "--checkpoint=some"], "--checkpoint is 'some'; give one of none, selective, alternate, full"),
        (["plan", "gpt-tiny", "--attention", "quick"], "--attention is 'quick'; give one of fused, plain"),
        (["plan", "mlp", "--attention", "plain"], "'mlp' has no option 'attention'; its options are"),
        (["plan", "gpt-tiny", "--option", "heads"], "--option is 'heads'; write NAME=VALUE, such as dtype=float32"),
        (["plan", "gpt-tiny", "--option", "seq=8"], "--option is 'seq=8', which has an option of its own: write --seq"),
        (["plan", "gpt-tiny", "--option", "width=8"], "'gpt-tiny' has no option 'width'; its options are"),
        (["plan", "gpt-tiny", "--option", "dtype=bf17"], "dtype='bf17' of 'gpt-tiny' is none of bfloat16, float16"),
        (["plan", "gpt-tiny", "--option", "heads=two"], "heads='two' of 'gpt-tiny' is a str; give a value of type int"),
        (["plan", "gpt-tiny", "--option", "heads=0"], "heads=0 of 'gpt-tiny' must be a positive whole number"),
        (["plan", "mlp", "--cluster", "8 a100", "--batch", "0"], "batch=0 must be a positive whole number"),
        (["plan", "vit-tiny", "--cluster", "8 a100", "--layers", "-1"], "layers=-1 must be"),
        (["plan", "gpt-tiny", "--cluster", "8 a100", "--seq", "999"], "seq=999 is longer than the 64 positions"),
        (["plan", "unet-tiny", "--cluster", "8 a100", "--scan"], "cannot be scanned"),
        (
            ["plan", "mlp", "--cluster", "8 a100", "--method", "data", "--batch", "7"],
            "use a batch that is a multiple of 8",
        ),
        (["plan", "mlp", "--cluster", "1x2 h100 + 1x2 a100"], "`meshwright simulate` with --pipeline"),
        (["compare", "mlp", "--cluster", "1x2 h100 + 1x2 a100"], "name hosts of one kind"),
        (["plan", "mlp", "--cluster", "8 a100", "--pipeline", "--mesh", "8"], "--mesh is for plans without stages"),
        (
            ["plan", "mlp", "--cluster", "8 a100", "--recipe", "data"],
            "--recipe: cannot read 'data'; write some of data",
        ),
        (["plan", "mlp", "--cluster", "8 a100", "--recipe", "data=x"], "--recipe: data is 'x'; give a whole number"),
        (["plan", "mlp", "--cluster", "8 a100", "--recipe", "data=8", "--pipeline"], "leave out --pipeline"),
        (["plan", "mlp", "--cluster", "8 a100", "--recipe", "pipeline=8"], "but the model has 6 layers"),
        (["plan", "mlp", "--memory-fraction", "7"], "memory_fraction is 7.0; give a fraction above 0 and at most 1"),
        (["plan", "mlp", "--method", "data", "--memory-fraction", "7"], "memory_fraction is 7.0; give a fraction"),
        (["plan", "mlp", "--args", "mine:arguments"], "'mlp' is a model of the zoo, which brings its arguments"),
        (["plan", "mlp", "--json", "no/such/folder.json"], "there is no folder no/such; make it first"),
        (["plan", "mlp", "--save", "."], "cannot write .: it is a folder"),
        (["show", "nothing.json"], "there is no plan file nothing.json"),
        (["show", "."], "cannot be read: Is a directory"),
        (["show", "mine.py"], "mine.py is not a plan: it is not valid JSON"),
        (["plan", "mine:step"], "mine:step needs --args module:name"),
        (["plan", "mine:step", "--args", "mine:arguments", "--batch", "8"], "--batch is for models of the zoo"),
        (
            ["plan", "mine:step", "--args", "mine:arguments", "--checkpoint"],
            "--checkpoint is for models",
        ),
        (
            ["plan", "yours:step", "--args", "mine:arguments"],
            "MODEL: there is no module 'yours'; run the command in the",
        ),
        (["plan", "mine.py:step", "--args", "mine:arguments"], "write the module as Python imports it: mine:step"),
        (["plan", "mine:", "--args", "mine:arguments"], "write module:name, such as train:train_step"),
        (["plan", "mine:leap", "--args", "mine:arguments"], "'mine' has no 'leap'; it has jax, jnp, loss, step"),
        (["plan", "mine:arguments", "--args", "mine:arguments"], "is a tuple, not a function"),
        (["plan", "mine:step", "--args", "mine:nothing"], "--args: 'mine' has no 'nothing'"),
        (["plan", "mine:step", "--args", "mine:not_arguments"], "gives a dict; give a tuple with one entry for each"),
        (["plan", "mine:step", "--args", "mine:broken_arguments"], "could not be called: RuntimeError: no data here"),
        (["plan", "mine:step", "--args", "mine:wrong_arguments", "--cluster", "2 h100"], "JAX could not trace step"),
        (["plan", "faulty:step", "--args", "mine:arguments"], "importing 'faulty' failed: ValueError: bad day"),
        (["plan", "faulty:step", "--args", "mine:arguments"], "faulty.py:2"),
        (["plan", "unclosed:step", "--args", "mine:arguments"], "SyntaxError: '(' was never closed"),
        (["plan", "needy:step", "--args", "mine:arguments"], "No module named 'a_package_nobody_has'"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy(own, args, message):
    assert message in refuse(*args)


def test_unknown_options_and_methods_are_refused():
    assert "--methid" in run("plan", "mlp", "--methid", "auto", code=2).stderr
    assert "zero3" in run("plan", "mlp", "--method", "zero9", code=2).stderr


def test_a_plan_of_another_version_is_refused(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text('{"format": "meshwright-plan", "version": 99}')
    assert "is a plan of version 99" in refuse("show", file)


def test_ctrl_c_leaves_at_once_without_a_traceback(monkeypatch):
    def interrupted(*args, **options):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the command went on after Ctrl-C")

    monkeypatch.setattr(meshwright, "plan", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        result = run("plan", "mlp", "--cluster", "2 h100", code=130)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.stdout == "" and "Traceback" not in result.stderr


def test_solve_is_part_of_the_command(tmp_path):
    file = tmp_path / "problem.json"
    meshwright.ChoiceProblem(costs=[[1, 2], [0, 5]], edges=[(0, 1, [[9, 0], [0, 9]])]).save(file)
    result = run("solve", file, "--seconds", 60, "--workers", 1)
    assert json.loads(result.stdout.splitlines()[-1]) == [1, 0]
    run("solve", tmp_path / "none.json", code=2)


def test_help_shows_flags_as_flags():
    for command in ("plan", "solve", "chips"):
        text = run(command, "--help").stdout
        assert "<bool>" not in text and "--help" in text
    assert "<bool>" not in run("--help").stdout


def test_a_failure_to_trace_names_the_users_line(own):
    message = refuse("plan", "mine:step", "--args", "mine:wrong_arguments", "--cluster", "2x2 h100")
    assert re.search(r"JAX could not trace step: .*\(\S*mine\.py:6\)", message)


def test_what_means_nothing_is_refused(tmp_path):
    assert "'wide-resnet-tiny' has no sequence; leave seq out" in refuse("plan", "wide-resnet-tiny", "--seq", 64)
    run("plan", "mlp", "--cluster", "1x4 h100", "--save", tmp_path / "p.json")
    for seconds in ("-1", "nan"):
        text = refuse("explain", tmp_path / "p.json", "state/params/layers/0", f"--seconds={seconds}")
        assert f"seconds is {float(seconds)}; give the time for solving again, 0 or more" in text


def test_checkpoint_without_a_value_is_full_and_commands_may_have_no_arguments():
    assert spelled_out([]) == []
    assert spelled_out(["--checkpoint", "selective"]) == ["--checkpoint", "selective"]
    assert spelled_out(["--checkpoint", "--scan"]) == ["--checkpoint=full", "--scan"]
    assert spelled_out(["gpt-tiny", "--checkpoint"]) == ["gpt-tiny", "--checkpoint=full"]
    assert spelled_out(["--checkpoint", "gpt-tiny"]) == ["--checkpoint=full", "gpt-tiny"]
    assert spelled_out(["--no-checkpoint"]) == ["--checkpoint=none"]
    text = refuse("plan", "gpt-tiny", "--checkpoint", "nonsense")
    assert "--checkpoint is 'nonsense'; give one of none, selective, alternate, full" in text


def test_pipeline_alone_means_yes_and_takes_three_words():
    assert spelled_out(["plan", "--pipeline", "mlp"]) == ["plan", "--pipeline=yes", "mlp"]
    assert spelled_out(["mlp", "--pipeline", "no"]) == ["mlp", "--pipeline", "no"]
    assert spelled_out(["mlp", "--no-pipeline"]) == ["mlp", "--pipeline=no"]
    assert spelled_out([]) == []
    assert [parse_pipeline(word) for word in ("auto", "yes", "no")] == [None, True, False]
    with pytest.raises(CommandError, match="--pipeline is 'perhaps'; give auto, yes or no"):
        parse_pipeline("perhaps")
