"""Pairs of a drawn train step and a pipeline: three steps on virtual devices compared with one device."""

import time
import warnings
from functools import lru_cache
from typing import Any

import jax
import numpy as np

import meshwright as mw
from meshwright.errors import MeshwrightError
from tests.generator.pairs import Outcome
from tests.generator.train_steps import TrainStep, draw_train_step

STEPS = 3
CLOSE = 1e-9  # of the largest number of an array: everything is in float64


def outcome(seed: int, number: int) -> Outcome:
    """Runs one train step in one pipeline; a refusal that says why is no trouble, a wrong number or a crash is."""
    drawn = draw_train_step(seed)
    method, cluster = draw_method(np.random.default_rng((seed, number)), len(drawn.batch["x"]))
    pair, started, trouble = f"{seed}.{number} {method} of {drawn.words}", time.perf_counter(), ""
    seconds = 0.0
    with warnings.catch_warnings(), jax.enable_x64(True):
        warnings.simplefilter("ignore")
        try:
            step = mw.parallelize(drawn.step, cluster=cluster, method=method)
            step.plan(jax.eval_shape(drawn.init, jax.random.key(0)), drawn.batch)
            seconds = time.perf_counter() - started
            state = mw.create_state(drawn.init, jax.random.key(0), like=step)
            trouble = _differs(drawn, step, state, _on_one_device(seed))
        except MeshwrightError as error:
            pair += f": refused, {error}"
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
    return Outcome(pair, seconds, trouble)


def draw_method(rng: np.random.Generator, rows: int) -> tuple[Any, str]:
    """A pipeline and its cluster of at most 8 devices."""
    if rng.random() < 0.15:
        return mw.Auto(pipeline=True), "1x4 cpu"
    stages = int(rng.choice([2, 3, 4]))
    data, tensor = [(1, 1), (2, 1), (1, 2), (2, 2)][rng.integers(4 if stages == 2 else 3)]
    own = rows // data
    microbatch = int(rng.choice([m for m in range(1, own) if own % m == 0]))
    schedule = str(rng.choice(["gpipe", "1f1b", "1f1b", "zb-h1"]))
    recipe = mw.ThreeD(
        data,
        tensor,
        stages,
        microbatch,
        schedule,
        interleave=int(rng.choice([1, 1, 2])) if schedule == "1f1b" else 1,
        checkpoint=str(rng.choice(["none", "none", "selective", "full"])),
    )
    return recipe, f"1x{data * tensor * stages} cpu"


@lru_cache(maxsize=1)
def _on_one_device(seed: int) -> list[Any]:
    """States and metrics after each step."""
    drawn = draw_train_step(seed)
    step, state, found = jax.jit(drawn.step), jax.jit(drawn.init)(jax.random.key(0)), []
    for _ in range(STEPS):
        state, metrics = step(state, drawn.batch)
        found.append(jax.tree.map(np.asarray, (state, metrics)))
    return found


def _differs(drawn: TrainStep, step: Any, state: Any, expected: list[Any]) -> str:
    """Where a pipeline's numbers differ from one device's; empty if nowhere."""
    for number, one in enumerate(expected):
        state, metrics = step(state, drawn.batch)
        leaves = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves((state, metrics)), strict=True)
        for (path, a), b in leaves:
            a, b = np.asarray(a, float), np.asarray(b, float)
            if not np.abs(a - b).max() <= CLOSE * max(1.0, np.abs(a).max()):
                where = f"{jax.tree_util.keystr(path)} after step {number + 1}"
                return f"result {where} differs by {np.abs(a - b).max():.1e}"
    return ""
