"""The commands that let one see, and what they say of bad input."""

import gc
import subprocess
import sys

import pytest

from meshwright.cli import app
from meshwright.plan_files.storage import VERSION
from tests.cli.test_app import refuse, run
from tests.explain.alpa.test_dump import DUMPS, state, write
from tests.explain.plans import plan_of, tensor_parallel
from tests.plans.records.test_staged_record import planned

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "plan.json"
    tensor_parallel().save(path)
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    import meshwright as mw

    path = tmp_path_factory.mktemp("saved") / "other.json"
    plan_of("gpt-tiny", (4, 2), mw.DataParallel()).save(path)
    return path


def test_show_explain_diff_dump_and_report(saved, other, tmp_path):
    assert "Megatron tensor parallel ×2 over y" in run("show", saved).stdout
    assert "tensor (row)" in run("show", saved, "state/params/layers/*/down").stdout
    explained = run("explain", saved, "state/params/layers/0/up").stdout
    assert "column" in explained and "because" in explained
    assert "tensors sharded differently" in run("diff", saved, other).stdout
    run("dump", saved, tmp_path / "folder")
    assert "Megatron" in run("show", tmp_path / "folder").stdout
    run("report", saved, "-o", tmp_path / "page.html", "--against", other, "--seconds", 0.5)
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_show_reads_alpas_folders(tmp_path):
    for said, (kernel, second, moment, batch) in DUMPS.items():
        write(tmp_path, f"({state(kernel, second, moment)}, {{'x': {batch}}})")
        assert said in " ".join(run("show", tmp_path).stdout.split())


def test_bad_input_is_one_clear_line(saved, tmp_path):
    assert "there is no plan file" in refuse("show", tmp_path / "nothing.json")
    assert "state/params/layers/0/up" in refuse("explain", saved, "state/params/layer/0/up")
    assert "matches no argument" in refuse("show", saved, "nonsense/*")
    (tmp_path / "empty").mkdir()
    assert "neither plan.json nor Alpa's" in refuse("show", tmp_path / "empty")
    broken = tmp_path / "broken.json"
    broken.write_text(saved.read_text()[:5000])
    assert "not valid JSON" in refuse("diff", saved, broken)
    broken.write_text(saved.read_text().replace(f'"version": {VERSION}', '"version": 77'))
    assert "version 77" in refuse("report", broken, "-o", tmp_path / "page.html")
    assert "there is no folder" in refuse("report", saved, "-o", tmp_path / "no" / "page.html")
    assert "it is a folder" in refuse("report", saved, "-o", tmp_path)
    assert "cannot write" in refuse("dump", saved, broken / "folder")


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs the command as a shell does, past `typer.testing`: exit code, stdout, stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["meshwright", *map(str, arguments)])
        try:
            app.main()
            code = 0
        except SystemExit as left:
            code = left.code or 0
        found = capsys.readouterr()
        return code, found.out, found.err

    yield call
    gc.enable()  # a command that is over soon leaves it off,
    gc.unfreeze()  # and all that it loaded alone


def test_plain_commands_go_past_the_parser_and_say_the_same(main, saved, other, tmp_path):
    up = "state/params/layers/0/up"
    for arguments in (("show", saved), ("show", saved, up), ("diff", saved, other)):
        assert main(*arguments) == (0, run(*arguments).stdout, "")
    code, out, _ = main("explain", saved, up)
    assert code == 0 and "because" in out
    code, _, err = main("dump", saved, tmp_path / "folder")
    assert code == 0 and "wrote" in err and (tmp_path / "folder" / "solver.txt").exists()
    assert main("explain", saved) == (0, run("explain", saved).stdout, "")
    assert main("show", "--help")[0] == 0 and main("explain")[0] == 2


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "staged.json"
    planned("replicas").save(path)
    return path


def test_bad_input_is_said_in_a_line_by_every_command(main, saved, staged, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    damaged = {
        "future": f'"version": {VERSION} -> "version": {VERSION + 1}',
        "broken": '"arguments" -> "argument"',
        "record": '"record": " -> "record": "!',
    }
    for name, change in damaged.items():
        old, new = change.split(" -> ")
        (tmp_path / f"{name}.json").write_text(staged.read_text().replace(old, new, 1))
    up = "state/params/layers/3/up"
    for words, arguments in (
        ("look like state/params/layers/3/up", ("explain", staged, "state/params/layers/3/upp")),
        ("look like state/params/layers/0/up", ("explain", saved, "state/params/layer/0/up")),
        ("matches no argument or result", ("show", staged, "nothing/*")),
        ("explain one of them", ("explain", staged, "state/params/layers/*/up")),
        ("there is no plan file", ("explain", tmp_path / "nothing.json", up)),
        ("there is no plan file", ("diff", saved, tmp_path / "nothing.json")),
        ("not valid JSON", ("show", tmp_path / "file")),
        (f"of version {VERSION + 1}", ("show", tmp_path / "future.json")),
        ("damaged plan", ("explain", tmp_path / "broken.json", up)),
        ("damaged in its 'record'", ("explain", tmp_path / "record.json", up)),
        ("damaged in its 'record'", ("report", tmp_path / "record.json", "-o", tmp_path / "page.html")),
        ("neither plan.json nor Alpa's", ("show", tmp_path / "empty")),
        ("cannot write", ("dump", staged, tmp_path / "file" / "folder")),
        ("there is no folder", ("report", staged, "-o", tmp_path / "none" / "page.html")),
        ("it is a folder", ("report", staged, "-o", tmp_path / "empty")),
    ):
        code, out, err = main(*arguments)
        assert code == 2 and out == "" and "Traceback" not in err, arguments
        assert words in err and len(err.strip().splitlines()) == 1, (arguments, err)


def test_a_pipelined_plan_is_seen_by_every_command(main, staged, saved, tmp_path):
    code, out, _ = main("show", staged)
    assert code == 0 and "stage 1: data parallel ×2 over x" in " ".join(out.split())
    assert "D F_y" in main("show", staged, "state/params/layers/*/up")[1]
    code, out, _ = main("explain", staged, "state/params/layers/3/up")
    assert code == 0 and "the busiest stage" in out and "a microbatch" in out
    assert main("diff", staged, saved)[0] == 0
    assert main("dump", staged, tmp_path / "folder")[0] == 0
    assert main("report", staged, "-o", tmp_path / "page.html", "--seconds", 0.5)[0] == 0


@pytest.mark.parametrize("which", ["saved", "staged"])
def test_showing_loads_neither_jax_nor_numpy(which, request):
    plan = request.getfixturevalue(which)
    code = (
        f"import sys; from meshwright.cli.app import app; sys.argv = ['meshwright', 'show', {str(plan)!r}]\n"
        "try:\n app()\nexcept SystemExit:\n pass\n"
        "print(*(m for m in ('jax', 'numba', 'numpy', 'scipy') if m in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.split() == [] and "verdict" in done.stdout


def test_explaining_does_not_load_jax(saved):
    code = (
        f"import sys; from meshwright.cli import main\n"
        f"sys.argv = ['meshwright', 'explain', {str(saved)!r}, 'state/params/layers/0/up']\n"
        "main()\n"
        "print(*(m for m in sys.modules if m.startswith('jax.')), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.split() == [] and "because" in done.stdout
