"""`mw.train`: plans, trains, evaluates and saves as settings say, and continues by itself where it was interrupted."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright import jax_devices
from meshwright.arrays import PyTree
from meshwright.errors import DoesNotFit, TrainingError
from meshwright.facade import Plan
from meshwright.pipeline.search.equal_stages import ThreeD
from meshwright.planner.method_names import find_method
from meshwright.planner.methods import Auto, Method
from meshwright.runtime.processes.preemption import preempted
from meshwright.scratch import scratch_folder
from meshwright.trainer.export import check_export, export
from meshwright.trainer.metrics import Meter, Planned, slower_than_planned
from meshwright.trainer.models import TrainedModel, find_model
from meshwright.trainer.optimizers import called, make_optimizer, nearest
from meshwright.trainer.order import Windows, check_parts, ordered_batches
from meshwright.trainer.run_folder import RunFolder
from meshwright.trainer.settings import Settings, read_settings
from meshwright.trainer.sinks import Sink, make_sinks
from meshwright.trainer.steps import make_either_step, make_evaluation, make_init, make_train_step
from meshwright.trainer.tokens import Tokens, read_tokens
from meshwright.training.data import batches
from meshwright.training.parallelize import Parallelized, parallelize
from meshwright.training.saving.checkpoints import restore, save, saved_steps
from meshwright.training.state import create_state, follow
from meshwright.zoo.low_rank import adapter_shapes, weight_names

Evaluate = Callable[[int, PyTree], Mapping[str, float]]
_STORY = 4  # lines of a printed plan that tell it in short
_LOOK_S = 0.5  # between looks whether another process is ready


@dataclass(frozen=True)
class Trained:
    """A run that has ended.

    Attributes:
        state: Its last state: ``params``, the ``optimizer``'s, ``step``, and with adapters the ``frozen`` weights.
        step: How many steps it has taken.
        is_complete: Whether these are all; if not, it was asked to end, and saved what it had.
        plan: The plan of its step.
        figures: The last figures that were logged.
    """

    state: PyTree
    step: int
    is_complete: bool
    plan: Plan
    figures: Mapping[str, float]


def train(
    config: str | PathLike[str] | None = None,
    *,
    on_log: Sink | Sequence[Sink] = (),
    evaluate: Evaluate | None = None,
    **settings: Any,
) -> Trained:
    """Trains a language model as a TOML file, or keywords, say: ``meshwright train`` in Python.

    The step is planned for the cluster, and the plan is printed. With a folder, the run saves there, and a run that is
    started again with the same folder continues after its last checkpoint with the same batches, on any number of
    processes and devices.

    Args:
        config: A TOML file; none if everything is given by keyword.
        on_log: Called with the step and the figures of each line of the log; one function or several.
        evaluate: Called with the step and the state at each evaluation; returns further figures for the log.
        **settings: Settings in place of the file's: `meshwright.trainer.settings.Settings` has them all. Tables are
            dicts, and are merged with the file's.

    Raises:
        TrainingError: A setting or the data cannot be used.

    Examples:
        >>> import tempfile, pathlib, meshwright as mw
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "text.txt").write_text("a mesh of ships and a ship of meshes. " * 50)
        ...     trained = mw.train(
        ...         model="llama-tiny", data=folder, seq=32, batch_tokens=256, steps=2, cluster="1x1 cpu"
        ...     )
        plan ...
        step 2: loss ...
        >>> trained.step
        2
    """
    chosen = read_settings(config, settings)
    if chosen.folder is None and jax.process_count() > 1:
        raise TrainingError("folder is missing; with several processes give one on a disk that all of them see")
    with _folder(chosen) as folder:
        hooks = [on_log] if callable(on_log) else list(on_log)
        return _Run(chosen, folder).train(hooks, evaluate)


@contextmanager
def _folder(settings: Settings) -> Iterator[RunFolder]:
    """The run's folder, or one that goes away with the run."""
    if settings.folder is not None:
        folder = RunFolder(Path(settings.folder).expanduser().absolute())
        folder.make()
        yield folder
        return
    with scratch_folder("run") as scratch:
        yield RunFolder(scratch)


class _Run:
    """One run: its data, model, functions and plan. All of them are checked before anything is planned."""

    def __init__(self, settings: Settings, folder: RunFolder):
        self.settings, self.folder = settings, folder
        check_parts(settings.rows, jax.process_count())
        self.model = find_model(settings)
        optimizer, self.rate = make_optimizer(settings)
        if settings.export is not None:
            check_export(settings.export, self.model)
        self._read_data()
        adapters, scale = _adapters(settings, self.model)
        self.scale = scale
        self.init = make_init(self.model, optimizer, adapters)
        train_step = make_train_step(self.model, optimizer, scale)
        self._is_either = settings.is_staged and settings.evaluation is not None
        self.step: Parallelized = parallelize(
            make_either_step(train_step) if self._is_either else train_step,
            cluster=settings.cluster,
            method=_method(settings),
            microbatches=settings.microbatches,
            plans=folder.plans if settings.folder is not None else None,
        )
        loss = make_evaluation(self.model, scale, has_adapters=adapters is not None)
        self.held_out_loss = follow(loss, self.step, batch_argnums=1 if adapters is None else 2)

    def _read_data(self) -> None:
        """Finds the windows to train on, and those that are held out."""
        settings, asked = self.settings, self.settings.evaluation
        data = settings.data
        if data.tokenizer is None and settings.path is not None and Path(settings.path, "tokenizer.json").is_file():
            data = replace(data, tokenizer=settings.path)
        tokens = _first_then_all(lambda: read_tokens(data, self.folder.tokens))
        share = asked.share if asked is not None and asked.path is None else 0.0
        self.windows = Windows(tokens, settings.seq, self.model.vocab, last=1 - share)
        if asked is not None and asked.path is not None:
            other = replace(data, path=asked.path)
            tokens_held_out = _first_then_all(lambda: read_tokens(other, self.folder.tokens))
            self.held_out = Windows(tokens_held_out, settings.seq, self.model.vocab)
        elif asked is not None:
            self.held_out = Windows(tokens, settings.seq, self.model.vocab, first=1 - share)
        if settings.folder is not None:
            self.folder.check(settings, tokens)

    def train(self, hooks: Sequence[Sink], evaluate: Evaluate | None) -> Trained:
        """Trains up to the last step, from the last checkpoint if there is one."""
        plan = self._plan()
        state, start = self._state()
        is_first = jax.process_index() == 0
        sinks = [*(make_sinks(self.settings, start) if is_first else ()), *hooks]
        loop = _Loop(self, Meter(Planned.of(plan), self.settings.batch_tokens), sinks, evaluate)
        state, step = loop.run(state, start)
        if self.settings.export is not None and step == self.settings.steps:
            export(self.settings, self.model, state, self.scale)
        return Trained(state, step, step >= self.settings.steps, plan, loop.figures)

    def _learns(self, value: bool) -> tuple[Any, ...]:
        """What the step is told besides state and batch: whether it learns, where it also evaluates."""
        return (np.bool_(value),) if self._is_either else ()

    def learn(self, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """One step of the training."""
        found: tuple[PyTree, PyTree] = self.step(state, batch, *self._learns(True))
        return found

    def _plan(self) -> Plan:
        """Plans the step, and prints the plan."""
        types = jax.eval_shape(self.init, jax.random.key(0))
        try:
            plan = self.step.plan(types, self.model.batch, *self._learns(True))
        except DoesNotFit as error:
            if not self.settings.is_staged and (cause := _why_no_stages(self.settings)) is not None:
                error.args = (f"{error}\nNo plan in stages was looked for: {cause}.",)
            raise
        if jax.process_index() == 0:
            print(*str(plan).splitlines()[:_STORY], sep="\n", flush=True)
        return plan

    def _state(self) -> tuple[PyTree, int]:
        """The state of the last checkpoint, or a fresh one, and how many steps it has taken."""
        saved = saved_steps(self.folder.checkpoints)
        if not saved:
            return self._read_weights(create_state(self.init, jax.random.key(self.settings.seed), like=self.step)), 0
        if jax.process_index() == 0:
            print(f"continuing from step {saved[-1]} of {self.settings.steps}", flush=True)
        return restore(self.folder.checkpoints, like=self.step, step=saved[-1]), saved[-1]

    def _read_weights(self, state: PyTree) -> PyTree:
        """The fresh state, with a checkpoint's weights in place of its own where the model has one."""
        if self.model.read is None:
            return state
        name = "frozen" if "frozen" in state else "params"
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state.pop(name))
        return state | {name: self.model.read(self.step if name == "params" else types)}

    def batches(self, start: int) -> Iterator[PyTree]:
        """The batches from a step on, on the devices."""
        settings = self.settings
        part, num_parts = jax.process_index(), jax.process_count()
        order = ordered_batches(
            self.windows, settings.rows, start, settings.steps, seed=settings.seed, part=part, num_parts=num_parts
        )
        return batches(order, self.step)

    def evaluate(self, state: PyTree) -> tuple[PyTree, float]:
        """The state, which a pipeline gives back, and the mean loss of the held-out batches."""
        assert self.settings.evaluation is not None
        rows, part, num_parts = self.settings.rows, jax.process_index(), jax.process_count()
        count = min(self.settings.evaluation.batches, -(-len(self.held_out) // rows))
        order = ordered_batches(self.held_out, rows, 0, count, seed=None, part=part, num_parts=num_parts)
        losses = []
        for batch in batches(order, self.step if self._is_either else self.held_out_loss):
            if self._is_either:
                state, results = self.step(state, batch, *self._learns(False))
                losses.append(results["loss"])
            else:
                weights = [state[name] for name in ("params", "frozen") if name in state]
                losses.append(self.held_out_loss(*weights, batch))
        return state, sum(map(float, losses)) / count


class _Loop:
    """The steps of one run, and what is done between them."""

    def __init__(self, run: _Run, meter: Meter, sinks: Sequence[Sink], evaluate: Evaluate | None):
        self._run, self._meter, self._sinks, self._hook = run, meter, sinks, evaluate
        self._settings = run.settings
        self._is_slow = False
        self.figures: Mapping[str, float] = {}

    def run(self, state: PyTree, start: int) -> tuple[PyTree, int]:
        """The last state, and its step: that of the settings, or an earlier one where the run was asked to end."""
        keeps = self._settings.folder is not None
        results, step = None, start
        feed = self._run.batches(start)
        while step < self._settings.steps:
            state, results = self._run.learn(state, self._next(feed, results))
            step += 1
            self._meter.step()
            if step == start + 1:  # planning and compiling are no part of a step
                jax.block_until_ready(results)
                self._meter.mark()
            is_last = step == self._settings.steps or (keeps and preempted())
            if is_last or step % self._settings.log.every == 0:
                self._log(step, results)
            state = self._between(step, state, is_last)
            if is_last:
                break
        return state, step

    def _next(self, feed: Iterator[PyTree], results: PyTree) -> PyTree:
        """The next batch; waiting for it is lost if the devices are idle when it is there."""
        begun = time.perf_counter()
        batch = next(feed)
        if results is not None and results["loss"].is_ready():
            self._meter.lose_input(time.perf_counter() - begun)
        return batch

    def _log(self, step: int, results: PyTree) -> None:
        found = {name: float(results[name]) for name in ("loss", "grad_norm")}
        rate = {"learning_rate": float(self._run.rate(step - 1))}
        self._say(step, found | rate | self._meter.mark())
        line = slower_than_planned(self.figures)
        if line is not None and not self._is_slow and jax.process_index() == 0:
            print(line, flush=True)
        self._is_slow = line is not None

    def _between(self, step: int, state: PyTree, is_last: bool) -> PyTree:
        """Evaluates and saves where that is due; gives back the state."""
        asked, checkpoints = self._settings.evaluation, self._settings.checkpoints
        if asked is not None and (is_last or step % asked.every == 0):
            jax.block_until_ready(state["step"])
            with self._meter.waiting("evaluation"):
                further = self._hook(step, state) if self._hook else {}
                state, held_out_loss = self._run.evaluate(state)
            self._say(step, {"held_out_loss": held_out_loss, **further})
        if self._settings.folder is not None and (is_last or step % checkpoints.every == 0):
            jax.block_until_ready(state["step"])
            with self._meter.waiting("checkpoints"):
                save(self._run.folder.checkpoints, step, state, keep=checkpoints.keep, wait=is_last)
        return state

    def _say(self, step: int, figures: Mapping[str, float]) -> None:
        self.figures = {**self.figures, **figures}
        with self._meter.waiting("log"):  # the devices are idle, since the figures are theirs
            for sink in self._sinks:
                sink(step, figures)


def _method(settings: Settings) -> Method:
    method = find_method(settings.method)
    if settings.is_staged:
        if method != Auto() or (settings.pipeline and settings.recipe):
            raise TrainingError("method, pipeline and recipe each say how the step is split; give one of them")
        if (cause := _why_one_mesh(settings)) is not None:
            raise TrainingError(f"{cause}, and a pipeline has several; leave one of them out")
        if settings.pipeline:
            return Auto(pipeline=True, recompute=settings.recompute)
        recipe: Method = called("recipe", ThreeD, settings.recipe)
        return replace(recipe, recompute=settings.recompute)
    method = replace(method, recompute=settings.recompute)
    return replace(method, pipeline=False) if _why_no_stages(settings) and isinstance(method, Auto) else method


def _why_no_stages(settings: Settings) -> str | None:
    """Why stages are not looked for where nothing else fits; None if they are."""
    if settings.evaluation is not None:
        return "evaluation then takes a whole step for each batch; `pipeline = true` accepts that"
    return _why_one_mesh(settings)


def _why_one_mesh(settings: Settings) -> str | None:
    """What of a run cannot be done with a plan in stages; None if all can."""
    if settings.lora is not None and (settings.path is not None or settings.export is not None):
        return "adapters are added to a checkpoint's weights on one mesh"
    return None


def _adapters(settings: Settings, model: TrainedModel) -> tuple[PyTree | None, float]:
    """Shapes of the adapters that are trained, and their scale; None where all weights are."""
    if (lora := settings.lora) is None:
        return None, 1.0
    names = weight_names(model.loss, model.params, model.batch)
    for name in lora.targets:
        if name not in names:
            raise TrainingError(
                f"lora.targets has {name!r}, which is no weight of {model.name}; {nearest(name, names)}"
            )
    shapes = adapter_shapes(model.loss, model.params, model.batch, lora.rank, lora.targets)
    return shapes, lora.alpha / lora.rank


_reads = count()  # of tokens, by this process: in the same order in all processes


def _first_then_all(read: Callable[[], Tokens]) -> Tokens:
    """Reads in the first process, which may write a file, and then in the others."""
    place = f"meshwright/tokens/{next(_reads)}"
    if jax.process_index() > 0:
        while jax_devices.read_published(place, _LOOK_S) is None:
            pass
        return read()
    found = read()
    if jax.process_count() > 1:
        jax_devices.publish(place, "here")
    return found
