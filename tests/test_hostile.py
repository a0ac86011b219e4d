"""Damaged and hostile files: every reader and command does its work or says in one line what is wrong; nothing is run.

All files are made here, the same in every run, by `hostile.py`; the commands run in this process. An audit hook sees
every process that is started, by whatever way.
"""

import contextlib
import gc
import hashlib
import io
import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import meshwright as mw
from meshwright.cli import app
from meshwright.plan_files.packing import pack, unpack
from meshwright.profiler.database import load_survey, survey_path
from meshwright.profiler.survey import Machine, Reading, Survey
from meshwright.solver import ChoiceProblem
from meshwright.solver.warm import example
from tests import hostile
from tests.explain.alpa.test_dump import DUMPS, state, write
from tests.planner.examples import mlp_step

pytestmark = pytest.mark.slow

KERNEL = "state/params/0/kernel"
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "os.fork")
seen: list[str] = []
watching = False


def watch(event, args):
    if watching and event in FORBIDDEN:
        seen.append(f"{event} {args!r:.100}")


sys.addaudithook(watch)


@pytest.fixture(autouse=True)
def nothing_runs():
    """Fails a test in which code of a file ran."""
    global watching
    seen.clear()
    watching = True
    try:
        yield
    finally:
        watching = False
        gc.enable()  # commands that are over soon do without
    assert not seen
    assert "antigravity" not in sys.modules


@cache
def plans():
    """A plan without stages, and one with, as text."""
    step, args = mlp_step(16, 16, layers=2)
    recipe = mw.ThreeD(data=1, tensor=2, pipeline=2, microbatch=8)
    from meshwright.plan_files.storage import plan_json

    found = {
        "spmd": mw.plan(step, *args, cluster="1x4 h100", mesh=(2, 2), method=mw.TensorParallel()),
        "staged": mw.plan(step, *args, cluster="2x2 h100", method=recipe),
    }
    return {name: plan_json(plan) for name, plan in found.items()}


def command(*arguments):
    """The exit status of a command, and what it says on stderr; anything but an exit is a traceback."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            if not app._see([*map(str, arguments)]):
                app.app([*map(str, arguments)], prog_name="meshwright")
        except SystemExit as end:
            return end.code or 0, said.getvalue()
    return 0, said.getvalue()


def withstand(what, *arguments):
    """Runs a command; it must succeed, or fail with status 2 and one line. Returns whether it succeeded."""
    try:
        status, said = command(*arguments)
    except BaseException as error:
        raise AssertionError(f"{what}: {arguments[0]} ended in {type(error).__name__}: {error}") from error
    assert status in (0, 2), (what, arguments[0], status, said)
    if status == 2:
        *before, last = said.strip().splitlines()  # what is being done may be said before
        assert last.startswith(f"meshwright {arguments[0]}: ") and last.isprintable(), (what, said)
        assert len(before) <= 1 and "Traceback" not in said, (what, said)
    return status == 0


def look_at(what, path, number, tmp_path):
    """All that the command does with a plan, turn by turn; `show` every time. Returns whether all went well."""
    others = [
        ("explain", path, KERNEL, "--seconds", "0.01"),
        ("show", path, "*"),
        ("simulate", path),
        ("explain", path, KERNEL, "--seconds", "0.01"),
        ("diff", path, path),
        ("simulate", path, "--cluster", "2x2 a100"),
        ("dump", path, tmp_path / "dump"),
        ("explain", path, KERNEL, "--seconds", "0.01"),
        ("report", path, "-o", tmp_path / "page.html"),
    ]
    return all([withstand(what, "show", path), withstand(what, *others[number % len(others)])])


def damaged_plans(kind):
    for name, text in plans().items():
        data = json.loads(text)
        if kind == "bytes":
            yield from ((f"{name} {what}", raw) for what, raw in hostile.damaged_bytes(text.encode(), 1, 6))
        elif kind == "data":
            cases = hostile.damaged_data(data, 2, 50)
            yield from ((f"{name} {what}", hostile.as_text(changed)) for what, changed in cases)
        else:
            record = unpack(data["record"])
            for changes in (hostile.damaged_data(record, 3, 12), hostile.damaged_arrays(record, 4, 16)):
                for what, changed in changes:
                    yield f"{name} record {what}", hostile.as_text(data | {"record": pack(changed)})


@pytest.mark.parametrize("kind", ["bytes", "data", "record"])
def test_damaged_plans(kind, tmp_path):
    number, good = 0, 0
    for number, (what, raw) in enumerate(damaged_plans(kind), 1):
        path = tmp_path / "plan.json"
        path.write_bytes(raw)
        good += look_at(what, path, number, tmp_path)
    assert number >= 48 and good < number
    for name in plans():
        assert look_at(name, _written(tmp_path / "good.json", plans()[name]), 0, tmp_path)


def _written(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize("structure", hostile.STRUCTURES, ids=lambda s: str(s.get("node", "leaf")))
def test_structures_that_name_code(structure, tmp_path):
    data = json.loads(plans()["spmd"]) | {"in_structure": structure, "out_structure": structure}
    path = _written(tmp_path / "plan.json", json.dumps(data))
    look_at("structure", path, 1, tmp_path)
    with pytest.raises(mw.PlanFileError, match=r"in_structure does not name each of \d+ leaves once"):
        mw.Plan.load(path)  # tests/plans/test_pytree_json.py rebuilds such structures


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cost": "text"}, "damaged plan"),
        ({"cost": {"compute": "1", "communication": 0.0}}, r"cost.compute is '1' but must be a finite number"),
        ({"provenance": []}, r"provenance is \[\] but must be a table"),
        ({"flops": float("nan")}, "flops is nan but must be a finite number"),
        ({"arguments": {"x": 1}}, "damaged plan"),
        ({"version": True}, "version True"),
        ({"unsplittable": [7]}, r"unsplittable\[0\] is 7 but must be text"),
        ({"pipeline": None}, "damaged plan"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(change, words, tmp_path):
    path = _written(tmp_path / "plan.json", json.dumps(json.loads(plans()["spmd"]) | change))
    with pytest.raises(mw.PlanFileError, match=words) as caught:
        mw.Plan.load(path)
    assert str(path) in str(caught.value)


def test_a_mesh_too_large_is_said(tmp_path):
    data = json.loads(plans()["spmd"])
    data["mesh"]["shape"] = [10**9, 10**9]
    data["mesh"]["cluster"]["hosts"] = 10**12
    with pytest.raises(mw.PlanFileError, match="more than 1,048,576 devices"):
        mw.Plan.load(_written(tmp_path / "plan.json", json.dumps(data)))


@pytest.mark.parametrize("text", ["99999999999999999999x8 h100", f"{'9' * 5000}x8 h100", "1048577 h100"])
def test_a_cluster_too_large_is_refused_at_once(text):
    with pytest.raises(mw.ClusterError, match=r"more than 1,048,576 devices.*name fewer hosts"):
        mw.cluster(text)


def test_what_is_no_file_at_all(tmp_path):
    for path in (tmp_path, tmp_path / "nothing.json", Path("/dev/null")):
        for name in ("show", "simulate", "explain", "diff", "report", "solve"):
            more = {"explain": [KERNEL], "diff": [path], "report": ["-o", tmp_path / "page.html"]}.get(name, [])
            given = path / "plan.json" if name == "simulate" and path == tmp_path else path
            assert not withstand(f"{name} {path}", name, given, *more)


CLUSTER = Path(__file__).parents[1] / "examples" / "cluster.toml"
CLUSTERS = {
    "deep": "hosts = " + "[" * hostile.DEEP,
    "deep tables": "[" + ".".join("a" * 1 for _ in range(5000)) + "]",
    "many digits": f"hosts = {'9' * 5000}\nchip = 'h100'",
    "too many hosts": "hosts = 999999999999\nchip = 'h100'",
    "text for hosts": "hosts = 'four'\nchip = 'h100'",
    "no chip": "hosts = 4",
    "chip of another kind": "hosts = 4\nchip = 7",
    "chip elsewhere": "hosts = 4\nchip = '../../etc/passwd.toml'",
    "chip that is itself": "hosts = 4\nchip = 'cluster.toml'",
    "groups of nothing": "group = [[]]",
    "a group within a group": "[[group]]\nhosts = 1\nchip = 'h100'\n[[group.group]]\nhosts = 1",
    "infinite": "hosts = 1\nchip = 'h100'\n[intra]\nbandwidth = inf",
    "not a number": "hosts = 1\nchip = 'h100'\n[intra]\nbandwidth = nan",
    "edges of text": "hosts = 1\nchip = 'h100'\n[intra]\nedges = 'abc'",
    "edges of a number": "hosts = 1\nchip = 'h100'\n[intra]\nedges = 5",
    "a date": "hosts = 1979-05-27\nchip = 'h100'",
    "huge memory": "hosts = 1\nchip = 'h100'\n[chip_overrides]\nmemory = '" + "9" * 400 + "GB'",
    "an escape": 'hosts = 1\nchip = "\\u001b[2J"',
    "twice": "hosts = 1\nhosts = 2\nchip = 'h100'",
}


def test_damaged_clusters(tmp_path):
    path = tmp_path / "cluster.toml"
    cases = [(what, text.encode()) for what, text in CLUSTERS.items()]
    cases += hostile.damaged_bytes(CLUSTER.read_bytes(), 5, 12)
    for what, raw in cases:
        path.write_bytes(raw)
        try:
            found = mw.cluster(path)
        except mw.ClusterError as error:
            assert str(error).isprintable(), what
        else:
            assert found.num_devices >= 1, what
            assert what not in CLUSTERS, what
    path.write_text(CLUSTERS["deep"])
    assert not withstand("deep", "simulate", "gpt-tiny", "--cluster", path)


MACHINE = Machine("host", "cpu", "cpu", 1, 8, 2, "", "0.10", "0.10")


def test_damaged_measurements(tmp_path, caplog):
    """A database that cannot be used is measured again, with a warning, whatever is wrong with it."""
    survey = Survey(MACHINE, "2026-01-01", 1.0, 0.5, None, (Reading("matmul", 1e9, 0.1), Reading("launch", 0.0, 1e-5)))
    path = survey_path(tmp_path, MACHINE)
    data = survey.to_json()
    cases = [*hostile.damaged_bytes(hostile.as_text(data), 6, 8)]
    cases += [(what, hostile.as_text(changed)) for what, changed in hostile.damaged_data(data, 7, 30)]
    for what, raw in cases:
        path.write_bytes(raw)
        caplog.clear()
        found = load_survey(tmp_path, MACHINE)
        assert found is not None or path.name in caplog.text, what
    path.write_bytes(hostile.as_text(data))
    assert load_survey(tmp_path, MACHINE) == survey


def test_damaged_problems(tmp_path):
    example(True, num_nodes=6, num_states=3, seed=1).save(tmp_path / "good.json")
    data = json.loads((tmp_path / "good.json").read_text())
    cases = [*hostile.damaged_bytes(hostile.as_text(data), 8, 8)]
    cases += [(what, hostile.as_text(changed)) for what, changed in hostile.damaged_data(data, 9, 40)]
    cases += [("looks like gzip", b"\x1f\x8b" + bytes(20)), ("marks", b'{"a": "\\u0000array7"}' + b" " * (1 << 20))]
    for what, raw in cases:
        path = tmp_path / "problem.json"
        path.write_bytes(raw)
        try:
            ChoiceProblem.load(path)
        except mw.ProblemError as error:
            assert str(path) in str(error), what
    path.write_bytes(cases[0][1])
    assert not withstand("empty", "solve", path)


def test_damaged_folders_of_alpas(tmp_path):
    kernel, second, moment, batch = next(iter(DUMPS.values()))
    text = f"({state(kernel, second, moment)}, {{'x': {batch}}})"
    cases = [*hostile.damaged_bytes(text.encode(), 10, 12), ("deep", b"(" * hostile.DEEP), ("calls", b"f(" * 5000)]
    for what, raw in cases:
        write(tmp_path, text)
        next(tmp_path.glob("*input*")).write_bytes(raw)
        withstand(what, "show", tmp_path)


def test_damaged_tables_of_published_results(tmp_path):
    header = "row_id,source,model,gpus,gpu_type,hidden,layers,seq,heads,dp,tp,pp,microbatch,global_batch,step_s"
    text = f"{header}\n1,paper,gpt,8,h100,1024,4,512,8,1,8,1,1,8,0.5\n".encode()
    cases = [*hostile.damaged_bytes(text, 11, 6), ("nul", b"a\x00b,c\n1,2\n"), ("wide", b"a," * 200_000)]
    cases += [(w, text.replace(b",8,h100", b"," + w.encode() + b",h100")) for w in ("-1", "nan", "1e400", "9" * 400)]
    for what, raw in cases:
        path = tmp_path / "rows.csv"
        path.write_bytes(raw)
        withstand(what, "validate", "--rows", path)


def test_damaged_lists_of_a_checkpoints_leaves(tmp_path):
    """With a checksum that fits: whoever damages a file on purpose sees to that."""
    saved = {"w": np.arange(6.0, dtype=np.float32), "epoch": 12, "rate": 0.5}
    mw.save(tmp_path, 1, saved)
    path = tmp_path / "1" / "leaves" / "metadata"
    note = json.loads(path.read_text())
    cases = [*hostile.damaged_bytes(hostile.as_text(note), 12, 2)]
    for what, changed in hostile.damaged_data(note, 13, 40):
        if isinstance(changed.get("leaves"), list):
            text = json.dumps(changed["leaves"], sort_keys=True)
            changed = changed | {"checksum": hashlib.sha256(text.encode()).hexdigest()}
        cases.append((what, hostile.as_text(changed)))
    refused = 0
    for what, raw in cases:
        path.write_bytes(raw)
        try:
            found = mw.restore(tmp_path, like=saved)
        except mw.CheckpointError as error:
            refused += 1
            assert str(tmp_path) in str(error), what
        else:
            np.testing.assert_array_equal(found["w"], saved["w"], err_msg=what)
    assert refused > len(cases) // 2
