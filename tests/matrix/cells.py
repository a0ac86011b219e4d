"""Runs a cell: equal to one device, refused with a reason, wrong, or crashed."""

import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

import meshwright as mw
from tests.matrix.axes import Cell
from tests.matrix.one_device import STEPS, differs, made, reference
from tests.matrix.training import Training

EQUAL, REFUSED, WRONG, CRASHED = "equal", "refused", "wrong", "crashed"
ROWS_OF = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "1f1b", "zb-h1": "zb-h1"}
_METHODS = (mw.Auto(), mw.DataParallel(), mw.Zero(stage=1), mw.Zero(stage=3), mw.TensorParallel(), mw.Zero(stage=2))
_MESHES = ((2,), (2, 2))


@dataclass(frozen=True)
class Outcome:
    """What came of a cell.

    Attributes:
        cell: The cell, as text.
        verdict: `EQUAL`, `REFUSED`, `WRONG` or `CRASHED`.
        words: The reason of a refusal, the difference, or the error.
        seconds: How long planning took.
    """

    cell: str
    verdict: str
    words: str = ""
    seconds: float = 0.0


def run(cell: Cell) -> Outcome:
    """Runs it in this process."""
    try:
        training = made(cell.precision, cell.program, cell.framework)
        expected = reference(cell.precision, cell.program, cell.framework)
    except Exception as error:  # a fault of the matrix
        return Outcome(str(cell), CRASHED, f"one device: {type(error).__name__}: {error}".replace("\n", " ")[:400])
    seconds = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            seconds, found = _MODES.get(cell.mode, _trained)(training, cell)
            words = differs(expected, found)
            verdict = WRONG if words else EQUAL
        except mw.MeshwrightError as error:
            verdict, words = REFUSED, f"{type(error).__name__}: {error}".replace("\n", " ")
        except Exception as error:
            verdict, words = CRASHED, f"{type(error).__name__}: {error}".replace("\n", " ")[:400]
    return Outcome(str(cell), verdict, words, seconds)


def parallelized(training: Training, mode: str, variant: int) -> Any:
    """The step as a mode parallelises it."""
    last = training.num_state
    own: dict[str, Any] = {"batch_argnums": (last,), "state_argnums": tuple(range(last))}
    if mode in ROWS_OF:
        data, rows = (1, 2)[variant % 2], (2, 4, 1)[variant % 3]
        recipe = mw.ThreeD(
            data=data,
            pipeline=2,
            microbatch=rows,
            schedule=ROWS_OF[mode],
            interleave=2 if mode == "interleaved" else 1,
        )
        return mw.parallelize(training.step, cluster=f"1x{2 * data} cpu", method=recipe, **own)
    # Abstract meshes make every product use all axes that it can, however small it is.
    shape = _MESHES[variant // 6 % 2]
    mesh = mw.Mesh.abstract(shape, alpha=1.0, beta=(1.0, 0.1)[: len(shape)])
    count = (2, 4)[variant // 3 % 2] if mode == "microbatches" else 1
    return mw.parallelize(training.step, mesh=mesh, method=_METHODS[variant % 6], microbatches=count, **own)


def _created(training: Training, step: Any) -> tuple[float, Any]:
    """Seconds of planning, and a state that is created where the plan wants it."""
    types = jax.eval_shape(training.init, jax.random.key(0)) if training.jit is jax.jit else None
    started = time.perf_counter()
    if types is not None:
        step.plan(types, training.batch)
    seconds = time.perf_counter() - started
    state = mw.create_state(training.init, jax.random.key(0), like=step, example=(training.batch,))
    return seconds if types is not None else time.perf_counter() - started, state


def _steps(training: Training, step: Any, state: Any, count: int) -> Any:
    state, metrics = state if training.num_state > 1 else (state,), {}
    for _ in range(count):
        *state, metrics = step(*state, training.batch)
    return tuple(state), metrics


def _trained(training: Training, cell: Cell) -> tuple[float, Any]:
    step = parallelized(training, cell.mode, cell.variant)
    seconds, state = _created(training, step)
    return seconds, _steps(training, step, state, STEPS)


def _restored(training: Training, cell: Cell) -> tuple[float, Any]:
    """One step, a checkpoint, and another step on another mesh, or in another number of stages."""
    pipeline, v = ("gpipe", "1f1b", "zb-h1")[cell.variant % 3], cell.variant
    modes = (("spmd", "spmd"), ("spmd", pipeline), (pipeline, "spmd"), ("microbatches", pipeline))[v % 4]
    first, second = (parallelized(training, mode, v + n) for n, mode in enumerate(modes))
    seconds, state = _created(training, first)
    *state, _ = first(*(state if training.num_state > 1 else (state,)), training.batch)
    more, _ = _created(training, second)
    with tempfile.TemporaryDirectory() as folder:
        mw.save(folder, 1, tuple(state) if training.num_state > 1 else state[0])
        again = mw.restore(folder, like=second)
    return max(seconds, more), _steps(training, second, again, STEPS - 1)


def _verified(training: Training, cell: Cell) -> tuple[float, Any]:
    """The plan is compared with what XLA compiles; then the step runs all the same."""
    return _examined(training, cell, lambda plan: str(plan.verify()))


def _rehearsed(training: Training, cell: Cell) -> tuple[float, Any]:
    """One device's share is run; then the step runs all the same."""
    return _examined(training, cell, lambda plan: str(plan.rehearse(steps=1, segments=False)))


def _examined(training: Training, cell: Cell, examine: Callable[[mw.Plan], str]) -> tuple[float, Any]:
    mode = ("spmd", "microbatches", "1f1b", "spmd", "zb-h1", "gpipe")[cell.variant % 6]
    step = parallelized(training, mode, cell.variant)
    seconds, state = _created(training, step)
    if not examine(step.last_plan):
        raise AssertionError("the report is empty")
    return seconds, _steps(training, step, state, STEPS)


_MODES: dict[str, Callable[[Training, Cell], tuple[float, Any]]] = {
    "restored": _restored,
    "verify": _verified,
    "rehearse": _rehearsed,
    "cache": lambda training, cell: _trained(
        training,
        cell._replace(mode=("spmd", "1f1b", "microbatches", "gpipe", "zb-h1", "interleaved")[cell.variant % 6]),
    ),
}
