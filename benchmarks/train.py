"""Does `mw.train` on one accelerator reach the tokens per second of its plan, and is the MFU that it prints right?

    python benchmarks/train.py            # Llama-2-7B with 8 of its layers (1.9 B), on one GPU; less than 3 minutes
    python benchmarks/train.py --small    # the same program with a tiny model, to try it anywhere

Asked: tokens per second within 8% of the plan's, MFU within 2% of a count by hand, and a loop that costs at most 1%
over calling the step by hand, for steps of about 50 ms. The MFU by hand is the FLOPs of the weights' products,
6 · weights · tokens, and of causal attention's, 6 · layers · tokens · seq · heads · head's width, over the measured
time and the catalogue's peak of the chip in bfloat16.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import numpy as np
from report import table

import meshwright as mw
from meshwright.hardware.lookup import find_device_kind
from meshwright.trainer.metrics import Meter, Planned
from meshwright.trainer.run_folder import RunFolder
from meshwright.trainer.settings import Settings, read_settings
from meshwright.trainer.sinks import make_sinks
from meshwright.trainer.train import _Loop, _Run

LARGE = {"model": "llama2-7b", "shape": {"layers": 8}, "seq": 2048, "batch_tokens": 16384}
SHORT = {"model": "llama2-7b", "shape": {"layers": 4}, "seq": 2048, "batch_tokens": 4096}
TINY = {"model": "llama-tiny", "shape": {}, "seq": 64, "batch_tokens": 512}
LOG = {"every": 10}


def settings_of(options: dict[str, Any], folder: Path, steps: int, vocab: int) -> Settings:
    """The settings of a run on random tokens, which are made in the folder."""
    tokens = np.random.default_rng(0).integers(0, vocab, 4_000_000).astype(np.uint16)
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    data = {"path": str(folder / "tokens.bin")}
    return read_settings(None, {**options, "data": data, "steps": steps, "method": "auto", "log": LOG})


def trained(options: dict[str, Any], steps: int, vocab: int) -> list[tuple[object, ...]]:
    """A run as users make it: what it logs, beside the plan and the count by hand."""
    logged: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        settings = settings_of(options, Path(scratch), steps, vocab)
        result = mw.train(
            **{**options, "data": {"path": settings.data.path}, "steps": steps, "log": LOG},
            on_log=lambda step, figures: logged.append(dict(figures)) if "step_s" in figures else None,
        )
        config = _Run(settings, RunFolder(Path(scratch))).model.config
    step_s = statistics.median(figures["step_s"] for figures in logged)
    mfu = statistics.median(figures["mfu"] for figures in logged)
    planned_s = logged[-1]["planned_step_s"]
    tokens = settings.batch_tokens
    weights = sum(leaf.size for leaf in jax.tree.leaves(result.state["params"]) if leaf.ndim > 1)
    weights -= config.vocab * config.hidden  # of the embedding, which is looked up and not multiplied by
    head_dim = config.hidden // config.heads
    flops = 6 * weights * tokens + 6 * config.layers * tokens * settings.seq * config.heads * head_dim
    chip = find_device_kind(jax.devices()[0].device_kind) or result.plan.mesh.cluster.chip
    by_hand = flops / step_s / chip.peak_flops("bfloat16") / jax.device_count()
    return [
        ("step", f"{1e3 * step_s:.1f} ms", f"{1e3 * planned_s:.1f} ms", f"{step_s / planned_s - 1:+.1%}"),
        ("tokens/s", f"{tokens / step_s:,.0f}", f"{tokens / planned_s:,.0f}", f"{planned_s / step_s - 1:+.1%}"),
        ("MFU", f"{mfu:.2%}", f"{by_hand:.2%} by hand", f"{mfu / by_hand - 1:+.1%}"),
    ]


def loop(options: dict[str, Any], steps: int, rounds: int, vocab: int) -> tuple[object, ...]:
    """Rounds of a loop by hand and of the run's own, in turns in one process."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = settings_of(options, Path(scratch), steps, vocab)
        run = _Run(settings, RunFolder(Path(scratch)))
        plan = run._plan()
        state, _ = run._state()
        placed = list(run.batches(0))
        by_hand, by_loop = [], []
        for number in range(rounds + 1):
            begun = time.perf_counter()
            for batch in placed:
                state, results = run.step(state, batch)
            jax.block_until_ready((state, results))
            middle = time.perf_counter()
            meter = Meter(Planned.of(plan), settings.batch_tokens)
            before = time.perf_counter()
            state, _ = _Loop(run, meter, make_sinks(settings, 0), None).run(state, 0)
            jax.block_until_ready(state)
            if number:  # the first round compiles
                by_hand.append((middle - begun) / steps)
                by_loop.append((time.perf_counter() - before) / steps)
    ratio = statistics.median(one / other for one, other in zip(by_loop, by_hand, strict=True))
    of_loop, of_hand = statistics.median(by_loop), statistics.median(by_hand)
    return ("loop", f"{1e3 * of_loop:.2f} ms a step", f"{1e3 * of_hand:.2f} ms by hand", f"{ratio - 1:+.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parsed = parser.parse_args()
    large, short, vocab = (TINY, TINY, 256) if parsed.small else (LARGE, SHORT, 32_000)
    rows = trained(large, parsed.steps, vocab)
    print(*rows, sep="\n", flush=True)
    rows.append(loop(short, parsed.steps, parsed.rounds, vocab))
    header = ("", "measured", "planned, or by hand", "difference")
    device, command = jax.devices()[0].device_kind, " ".join(["python benchmarks/train.py", *sys.argv[1:]])
    table("Train on one device", f"{(__doc__ or '').splitlines()[0]} One {device}: `{command}`.", header, rows)


if __name__ == "__main__":
    main()
