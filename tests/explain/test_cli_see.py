"""The commands that let one see, and what they say of bad input."""

import subprocess
import sys

import pytest

from tests.test_cli import refuse, run

from .plans import plan_of, tensor_parallel
from .test_alpa import DUMPS, state, write


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
    assert "tensors that lie otherwise" in run("diff", saved, other).stdout
    run("dump", saved, tmp_path / "folder")
    assert "Megatron" in run("show", tmp_path / "folder").stdout
    run("report", saved, "-o", tmp_path / "page.html", "--against", other)
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
    broken.write_text(saved.read_text().replace('"version": 3', '"version": 77'))
    assert "version 77" in refuse("report", broken, "-o", tmp_path / "page.html")
    assert "there is no folder" in refuse("report", saved, "-o", tmp_path / "no" / "page.html")
    assert "it is a folder" in refuse("report", saved, "-o", tmp_path)
    assert "cannot write" in refuse("dump", saved, broken / "folder")


def test_showing_loads_neither_jax_nor_numpy(saved):
    code = (
        f"import sys; from meshwright.cli import app; sys.argv = ['meshwright', 'show', {str(saved)!r}]\n"
        "try:\n app()\nexcept SystemExit:\n pass\n"
        "print(*(m for m in ('jax', 'numba', 'numpy', 'scipy') if m in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.split() == [] and "verdict" in done.stdout
