"""How long a newcomer waits: the README's ten lines, a command and the demo, each with nothing compiled yet.

python benchmarks/first_use.py            # a copy of the package without bytecode, and an empty folder for kernels
python benchmarks/first_use.py --venv     # from a clean clone, with pip's own time by itself; needs a network
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from report import table

ROOT = Path(__file__).parents[1]
BEFORE = "import time\nbegin = time.perf_counter()\n"
AFTER = """
import json, meshwright.jit
ready = time.perf_counter()
mw.plan(train_step, params, batch, cluster="4x8 h100")
again = time.perf_counter()
found = {"first_s": ready - begin, "second_s": again - ready, "compiled": meshwright.jit.compiling.names}
print(json.dumps({**found, "compile_s": meshwright.jit.compiling.seconds, "solved_s": plan.solution.seconds}))
"""


def ten_lines() -> str:
    """The first Python block of the README, timed."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    if block is None:
        raise SystemExit("README.md has no Python block")
    return BEFORE + block[1] + AFTER


def run(command: Sequence[str], folder: Path, settings: Mapping[str, str]) -> tuple[float, str]:
    """Seconds that a command took, and what it printed."""
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return time.perf_counter() - begin, done.stdout


def measured(python: str, folder: Path, settings: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """The rows of the table; each command has empty folders of its own for kernels and for figures of the machine."""
    script = folder / "ten_lines.py"
    script.write_text(ten_lines(), encoding="utf-8")
    rows: list[tuple[str, str, str]] = []

    def empty(name: str) -> dict[str, str]:
        kept = {"NUMBA_CACHE_DIR": str(folder / f"kernels-{name}"), "MESHWRIGHT_CACHE": str(folder / f"machine-{name}")}
        return {**settings, **kept}

    for what in ("the ten lines", "the ten lines again, another process"):
        seconds, text = run([python, str(script)], folder, empty("ten"))
        found = json.loads(text.splitlines()[-1])
        compiled = f"{len(found['compiled'])} kernels in {found['compile_s']:.1f} s"
        rows.append((f"{what}, up to the plan", f"{found['first_s']:.1f}", compiled))
        solved = f"the first plan says: solved in {found['solved_s']:.2f} s"
        rows.append((f"{what}: the second plan", f"{found['second_s']:.2f}", solved))
        rows.append((f"{what}, whole process", f"{seconds:.1f}", ""))
    command = [python, "-m", "meshwright", "plan", "mlp", "--cluster", "2x4 h100"]
    rows.append(("`meshwright plan mlp --cluster '2x4 h100'`", f"{run(command, folder, empty('mlp'))[0]:.1f}", ""))
    demo = [python, str(ROOT / "examples" / "demo.py")]
    rows.append(("`examples/demo.py`", f"{run(demo, folder, empty('demo'))[0]:.1f}", ""))
    return rows


def from_copy(folder: Path) -> list[tuple[str, str, str]]:
    """With a copy of the package that has neither bytecode nor machine code."""
    package = folder / "src" / "meshwright"
    shutil.copytree(ROOT / "src" / "meshwright", package, ignore=shutil.ignore_patterns("__pycache__"))
    return measured(sys.executable, folder, {"PYTHONPATH": str(package.parent)})


def from_clone(folder: Path) -> list[tuple[str, str, str]]:
    """From a clean clone, as the README says."""
    clone, venv = folder / "clone", folder / "venv"
    run(["git", "clone", "--quiet", str(ROOT), str(clone)], folder, {})
    run([sys.executable, "-m", "venv", str(venv)], folder, {})
    python = str(venv / "bin" / "python")
    pip = run([python, "-m", "pip", "install", "--quiet", "."], clone, {})[0]
    rows = [("`pip install .`", f"{pip:.1f}", "pip's own time"), *measured(python, folder, {})]
    for target in ("setup", "demo"):
        remark = f"pip's own time, about {pip:.0f} s, included" if target == "setup" else "after `make setup`"
        rows.append((f"`make {target}`", f"{run(['make', target], clone, {})[0]:.1f}", remark))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", action="store_true", help="from a clean clone, with pip; needs a network")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = (from_clone if options.venv else from_copy)(Path(folder))
    question = (
        "How many seconds does a newcomer wait? The ten lines are those of the README; nothing is compiled before each "
        "of the commands, but for the second process of the ten lines."
    )
    title = "First use from a clone" if options.venv else "First use"
    table(title, question, ("what", "seconds", "remark"), found)


if __name__ == "__main__":
    main()
