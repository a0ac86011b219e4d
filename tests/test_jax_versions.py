"""Releases of JAX: the range is the one that pip reads, a newer one is met with a line, and what it lacks is named."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import meshwright as mw
from meshwright.jax_compat.versions import RANGE, private, warn_of_newer

ROOT = Path(__file__).parents[1]


def test_the_range_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert RANGE in project["dependencies"]


@pytest.mark.parametrize(("release", "said"), [("0.12.9.dev3", 0), ("0.10.0", 0), ("0.13.0", 1), ("1.0.0.dev2026", 1)])
def test_a_newer_release_is_met_with_one_line(monkeypatch, caplog, release, said):
    monkeypatch.setattr(jax, "__version__", release)
    warn_of_newer()
    assert len(caplog.records) == said
    if said:
        expected = f"jax {release} is newer than what was tried: where anything fails, install 'jax>=0.10,<0.13'"
        assert caplog.messages == [expected]


@pytest.mark.parametrize(
    ("module", "names", "lacking"),
    [("jax._src.core", ("Var", "Vor", "Vur"), "jax._src.core.Vor"), ("jax._src.no", (), "jax._src.no")],
)
def test_what_a_release_lacks_is_named_with_it(monkeypatch, module, names, lacking):
    monkeypatch.setattr(jax, "__version__", "0.13.0")
    with pytest.raises(mw.MeshwrightError) as caught:
        private(module, *names)
    assert str(caught.value) == (f"jax 0.13.0 has no {lacking}, which this version needs: install 'jax>=0.10,<0.13'")


@pytest.mark.parametrize("file", ["jax_compat/__init__.py", "jax_compat/kernels.py", "jax_devices.py"])
def test_every_private_name_that_is_used_is_looked_for(file):
    tree = ast.parse((ROOT / "src/meshwright" / file).read_text(encoding="utf-8"))
    known, used = {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("private("):
            known[node.targets[0].id] = {arg.value for arg in node.value.args[1:]}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.setdefault(node.value.id, set()).add(node.attr)
        assert not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("jax._src")
    assert len(known) >= 4
    assert {module: used[module] for module in known} == known


@pytest.mark.slow
def test_a_plan_under_a_release_without_a_name_ends_in_a_sentence():
    script = (
        "import jax; from jax._src import core; del core.trace_state_clean\nfrom meshwright.cli import main; main()"
    )
    command = [sys.executable, "-c", script, "plan", "mlp", "--cluster", "1x2 h100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and done.stdout == ""
    assert "has no jax._src.core.trace_state_clean" in done.stderr and "Traceback" not in done.stderr
