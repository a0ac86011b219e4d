"""Optimizers and learning-rate schedules of optax by their names."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from meshwright.errors import TrainingError
from meshwright.trainer.settings import Settings

_SUFFIX = "_schedule"


def make_optimizer(settings: Settings) -> tuple[Any, Callable[[int], float]]:
    """The gradient transformation of a run, and its learning rate at each step.

    Raises:
        TrainingError: optax has no such optimizer or schedule, or it has other options.
    """
    import optax

    chosen = settings.optimizer
    known = {name: f for name, f in _functions(optax) if "learning_rate" in inspect.signature(f).parameters}
    make = _named("optimizer", chosen.name, known)
    rate = _schedule(settings)
    made = called(f"optimizer.options of {chosen.name}", make, {**chosen.options, "learning_rate": rate})
    limit = [optax.clip_by_global_norm(chosen.clip_norm)] if chosen.clip_norm else []
    return optax.chain(*limit, made), rate


def _schedule(settings: Settings) -> Callable[[int], float]:
    import optax

    peak, schedule = settings.optimizer.learning_rate, settings.schedule
    if schedule is None:
        return optax.schedules.constant_schedule(peak)
    known = {name.removesuffix(_SUFFIX): f for name, f in _functions(optax) if name.endswith(_SUFFIX)}
    make = _named("schedule", schedule.name.removesuffix(_SUFFIX), known)
    takes = inspect.signature(make).parameters
    given: dict[str, float] = {"decay_steps": settings.steps, "transition_steps": settings.steps}
    for name in ("peak_value", "init_value", "value"):
        if name in takes:
            given[name] = peak
            break
    if "peak_value" in takes:
        given["init_value"] = 0.0
    options = {name: value for name, value in given.items() if name in takes} | schedule.options
    found: Callable[[int], float] = called(f"schedule.options of {schedule.name}", make, options)
    return found


def _functions(module: Any) -> list[tuple[str, Callable[..., Any]]]:
    """Its public functions, but for parts that optimizers are made of."""
    hidden = ("_", "scale_by_")
    return [pair for pair in inspect.getmembers(module, inspect.isfunction) if not pair[0].startswith(hidden)]


def _named(what: str, name: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if name not in known:
        raise TrainingError(f"optax has no {what} {name!r}; {nearest(name, known)}")
    return known[name]


def called(where: str, make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """What a function makes of options; those that it has not or cannot take are refused, with where they stand."""
    takes = inspect.signature(make).parameters
    for name in options:
        if name not in takes:
            raise TrainingError(f"{where} has no {name!r}; {nearest(name, takes)}")
    missing = [n for n, p in takes.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    for name in missing:
        if name not in options:
            raise TrainingError(f"{where} lacks {name!r}, which has no default; give it")
    try:
        return make(**options)
    except (TypeError, ValueError) as error:
        raise TrainingError(f"{where} cannot be used: {error}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a message: the names that look most like one that is not there."""
    names = list(known)
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    return f"the nearest is {' or '.join(close)}" if close else f"there are {', '.join(names)}"
