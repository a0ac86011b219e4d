"""How long until one sees a saved plan of Llama-2-13B: shown, explained, diffed, as a web page, and in the browser?"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import table

import meshwright as mw
from meshwright import zoo

ROUNDS = 3
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = ("plan.json", "other.json", "tight.json", "staged.json", "report.html", "tight.html", "staged.html")
        plan, other, tight, staged, page, *pages = (Path(folder) / name for name in names)
        example = zoo.build("llama2-13b", batch=200, seq=2048, checkpoint=True)
        args = (example.train_step, example.state, example.batch)
        mw.plan(*args, cluster="50x4 a100-80gb", mesh=(50, 4)).save(plan)
        mw.plan(*args, cluster="50x4 a100-80gb", mesh=(25, 8)).save(other)
        mw.plan(*args, cluster="50x4 a100-40gb", mesh=(25, 2, 4)).save(tight)
        recipe = mw.ThreeD(data=10, tensor=4, pipeline=5, microbatch=1)
        mw.plan(*args, cluster="50x4 a100-80gb", method=recipe).save(staged)
        rows = [("plan file", f"{plan.stat().st_size / 1e6:.1f} MB", "", "")]
        rows.append(("plan file, pipelined", f"{staged.stat().st_size / 1e6:.1f} MB", "", ""))
        for name, goal, command in (
            ("meshwright show", "0.5 s", ["show", plan]),
            ("meshwright explain", "2 s", ["explain", plan, "state/params/layers/3/up"]),
            ("meshwright diff", "", ["diff", plan, other]),
            ("meshwright report", "3 s", ["report", plan, "-o", page, "--seconds", 1.6]),
            ("explain, memory full", "2 s", ["explain", tight, "state/params/layers/3/up"]),
            ("report, memory full", "3 s", ["report", tight, "-o", pages[0], "--seconds", 1.6]),
            ("show, pipelined", "0.5 s", ["show", staged]),
            ("explain, pipelined", "2 s", ["explain", staged, "state/params/layers/3/up"]),
            ("report, pipelined", "3 s", ["report", staged, "-o", pages[1], "--seconds", 1.6]),
        ):
            wall, cpu = _best(command)
            rows.append((name, f"{wall:.2f} s", f"{cpu:.2f} s", goal))
        for name, path in (("page", page), ("page, memory full", pages[0]), ("page, pipelined", pages[1])):
            rows.append((name, f"{path.stat().st_size / 1e6:.2f} MB", "", "3 MB"))
        rows.append(("page interactive in Chromium", _interactive(page), "", "1 s"))
    table("Seeing", __doc__ or "", ("what", "least of three", "of these CPU", "goal"), rows)


def _best(command: Sequence[object]) -> tuple[float, float]:
    """The least wall-clock and CPU seconds of a command, the start of Python included."""
    wall, cpu = [], []
    for _ in range(ROUNDS):
        started, before = time.perf_counter(), os.times()
        subprocess.run([sys.executable, "-m", "meshwright.cli", *map(str, command)], check=True, capture_output=True)
        after = os.times()
        wall.append(time.perf_counter() - started)
        cpu.append(sum(after[2:4]) - sum(before[2:4]))
    return min(wall), min(cpu)


def _interactive(page: Path) -> str:
    """Milliseconds from navigation until the page answers to keys and clicks, as the page itself says."""
    browser = shutil.which("chromium")
    if browser is None:
        return "no Chromium here"
    from playwright.sync_api import sync_playwright

    times = []
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=FLAGS)
        for _ in range(ROUNDS):
            tab = chromium.new_page()
            tab.goto(page.as_uri())
            tab.wait_for_selector("#step")
            times.append(int(tab.evaluate("document.documentElement.dataset.ready")))
            tab.close()
        chromium.close()
    return f"{min(times) / 1000:.2f} s"


if __name__ == "__main__":
    main()
