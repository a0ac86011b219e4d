"""What does the loop of `mw.train` cost, and does a killed run continue to the bit? SIGKILL at random times.

    python benchmarks/train_loop.py                  # both
    python benchmarks/train_loop.py --part loop
    python benchmarks/train_loop.py --part kills --kills 20

Asked: at most 1% over calling the step by hand, with steps of 50 ms; after every kill the losses of all steps, and the
state at the end, are those of an undisturbed run, bit for bit.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import table

RUN = {
    "model": "llama-tiny",
    "precision": "float32",
    "cluster": "local",
    "checkpoints": {"every": 20, "keep": 2},
    "optimizer": {"learning_rate": 1e-3},
}
STEPS = 300  # of the run that is killed
LATEST = 0.3  # of a kill after the first step of an attempt, as a share of what a whole run takes
EARLY = 0.25  # of the kills: while a run still starts, plans, compiles or restores


def write_text(folder):
    words = ["a", "mesh", "of", "ships", "the", "ship", "builds", "splits"]
    (folder / "text.txt").write_text(" ".join(random.Random(0).choices(words, k=100_000)))
    return str(folder / "text.txt")


def loop(rounds, steps):
    """Rounds of a loop by hand and of the run's own, in turns in one process."""
    import jax

    from meshwright.trainer.metrics import Meter, Planned
    from meshwright.trainer.run_folder import RunFolder
    from meshwright.trainer.settings import read_settings
    from meshwright.trainer.sinks import make_sinks
    from meshwright.trainer.train import _Loop, _Run

    with tempfile.TemporaryDirectory() as scratch:
        shape = {"layers": 2, "hidden": 256, "ffn": 512, "heads": 4, "kv_heads": 4}
        sizes = {"shape": shape, "seq": 128, "batch_tokens": 256, "steps": steps}
        settings = read_settings(None, RUN | sizes | {"data": write_text(Path(scratch))})
        run = _Run(settings, RunFolder(Path(scratch)))
        plan = run._plan()
        state, _ = run._state()
        placed = list(run.batches(0))
        sinks = make_sinks(replace(settings, folder=scratch), 0)
        by_hand, by_loop, cpu_s = [], [], []
        for number in range(rounds + 1):
            began, cpu = time.perf_counter(), time.thread_time()
            for batch in placed:
                state, results = run.step(state, batch)
            jax.block_until_ready((state, results))
            middle, hand_cpu = time.perf_counter(), time.thread_time() - cpu
            meter = Meter(Planned.of(plan), settings.batch_tokens)
            before, cpu = time.perf_counter(), time.thread_time()
            state, _ = _Loop(run, meter, sinks, None).run(state, 0)
            jax.block_until_ready(state)
            if number:  # the first round compiles
                by_hand.append((middle - began) / steps)
                by_loop.append((time.perf_counter() - before) / steps)
                cpu_s.append((time.thread_time() - cpu - hand_cpu) / steps)
    ratios = [loop / hand for loop, hand in zip(by_loop, by_hand, strict=True)]
    rows = [[f"{1e3 * h:.2f}", f"{1e3 * o:.2f}", f"{o / h - 1:+.2%}"] for h, o in zip(by_hand, by_loop, strict=True)]
    rows.append(["", "median", f"{statistics.median(ratios) - 1:+.2%}"])
    question = (
        f"What does the loop cost over calling the step by hand? Rounds of {steps} steps, in turns in one process. "
        f"The main thread computes {1e3 * statistics.median(cpu_s):.3f} ms more a step, whatever else runs."
    )
    table("Train loop", question, ["by hand (ms a step)", "mw.train's loop (ms a step)", "more"], rows)


def kills(count, seed):
    """One run that is killed so often, and one that is not."""
    drawn = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        text = write_text(Path(scratch))
        whole, killed = Path(scratch, "whole"), Path(scratch, "killed")
        began = time.perf_counter()
        assert start(text, whole).wait() == 0
        whole_s = time.perf_counter() - began
        startup_s = whole_s - _seconds_of_steps(whole)
        rows, outcomes, killed = [], [], Path(scratch, "killed0")
        while len(rows) < count:
            before = last_step(killed)
            process = start(text, killed)
            is_early = drawn.random() < EARLY
            if is_early:
                time.sleep(drawn.uniform(0, startup_s))
            else:
                while process.poll() is None and last_step(killed, process.pid) == 0:
                    time.sleep(0.05)
                time.sleep(drawn.uniform(0, LATEST * whole_s))
            if process.poll() is not None:  # it came to its end: the next kills are another run's
                assert process.returncode == 0
                outcomes.append(compared(whole, killed))
                killed = Path(scratch, f"killed{len(outcomes)}")
                continue
            process.kill()
            process.wait()
            phase = "starting" if last_step(killed, process.pid) == 0 else "stepping"
            rows.append([str(len(rows) + 1), phase, str(before), str(last_step(killed))])
            print(*rows[-1], file=sys.stderr, flush=True)
        assert start(text, killed).wait() == 0
        outcomes.append(compared(whole, killed))
    question = (
        f"{len(outcomes)} runs of {STEPS} steps, killed {count} times (SIGKILL) at random moments, against one that "
        f"was not: {', '.join(str(same) for same, _ in outcomes)} steps have the same loss and gradient norm to the "
        f"bit, and {', '.join(str(wrong) for _, wrong in outcomes)} leaves of the last state differ."
    )
    table("Train kills", question, ["kill", "while", "last step logged before", "last step logged after"], rows)


def start(text, folder):
    environment = os.environ | {"MESHWRIGHT_MEASURE": "never", "JAX_PLATFORMS": "cpu", "MESHWRIGHT_PROGRESS": "0"}
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import train_loop; "
    code += f"train_loop.run({text!r}, {str(folder)!r})"
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL)


def run(text, folder):
    """What a process that is killed runs."""
    import jax

    import meshwright as mw

    jax.config.update("jax_num_cpu_devices", 2)
    marked = Path(folder).with_name(f"{Path(folder).name}.pid")

    def mark(step, figures):
        marked.write_text(f"{os.getpid()} {step}")

    sizes = {"shape": {"layers": 1}, "seq": 16, "batch_tokens": 64, "steps": STEPS, "log": {"every": 1}}
    mw.train(**RUN | sizes, data=text, folder=folder, on_log=mark)


def last_step(folder, pid=None):
    """The last step that was logged; with a process, by it, and 0 where it has logged none."""
    marked = folder.with_name(f"{folder.name}.pid")
    words = marked.read_text().split() if marked.exists() else []
    if len(words) != 2 or (pid is not None and int(words[0]) != pid):
        return 0
    return int(words[1])


def _seconds_of_steps(folder):
    return sum(line.get("step_s", 0.0) for line in lines(folder))


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def compared(whole, killed):
    """How many steps have the same figures, and how many leaves of the state differ."""
    import jax
    import numpy as np

    import meshwright as mw
    from meshwright.trainer.models import find_model
    from meshwright.trainer.optimizers import make_optimizer
    from meshwright.trainer.settings import read_settings
    from meshwright.trainer.steps import make_init

    sizes = {"shape": {"layers": 1}, "seq": 16, "batch_tokens": 64, "steps": STEPS}
    settings = read_settings(None, RUN | sizes | {"data": "none"})
    init = make_init(find_model(settings), make_optimizer(settings)[0], None)
    like = jax.eval_shape(init, jax.random.key(0))
    states = [mw.restore(folder / "checkpoints", like=like, step=STEPS) for folder in (whole, killed)]
    leaves = zip(*map(jax.tree.leaves, states), strict=True)
    wrong = sum(not np.array_equal(a, b, equal_nan=False) for a, b in leaves)
    figures = [{line["step"]: (line["loss"], line["grad_norm"]) for line in lines(f)} for f in (whole, killed)]
    return sum(figures[0].get(n) == figures[1].get(n, ()) for n in range(1, STEPS + 1)), wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["loop", "kills"], help="only this one")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.part != "kills":
        loop(options.rounds, options.steps)
    if options.part != "loop":
        kills(options.kills, options.seed)


if __name__ == "__main__":
    main()
