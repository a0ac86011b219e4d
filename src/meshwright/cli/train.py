"""The `meshwright train` command: a training run from a TOML file, on this machine or as one of several processes."""

import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM
from typing import Annotated, Any

import typer

from meshwright.cli.console import CommandError, note


def train_command(
    config: Annotated[Path, typer.Argument(help="The run's settings, as TOML.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting in place of the file's, e.g. data.path=corpus."),
    ] = None,
    devices: Annotated[int | None, typer.Option(help="Virtual devices, where JAX runs on CPUs.")] = None,
) -> None:
    """Train a language model: plan it, print the plan, train, evaluate, save, and continue what was interrupted.

    Under a launcher that says so (JAX_COORDINATOR_ADDRESS, or Slurm with several tasks), it is one of all processes.
    """
    given = overrides(settings or [])
    import jax

    import meshwright as mw
    from meshwright.trainer.settings import read_settings

    folder = read_settings(config, given).folder
    if devices is not None:
        if devices < 1:
            raise CommandError(f"--devices is {devices}; give 1 or more")
        jax.config.update("jax_num_cpu_devices", devices)
    if has_launcher(os.environ):
        mw.initialize()
    with _programs_kept(folder):
        trained = mw.train(config, **given)
    if not trained.is_complete:
        note(f"meshwright train: asked to end, saved after step {trained.step}; start it again to continue")
        raise typer.Exit(128 + SIGTERM)


@contextmanager
def _programs_kept(folder: str | None) -> Iterator[None]:
    """Compiled programs are kept in a run's folder, so that it starts sooner again; unless JAX keeps them elsewhere."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    if folder is None or before[0] is not None:
        yield
        return
    try:
        for name, value in zip(names, (str(Path(folder).expanduser().absolute() / "programs"), 0), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # it has looked where programs are kept
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def overrides(settings: list[str]) -> dict[str, Any]:
    """Settings of the command line as tables.

    >>> overrides(["steps=3", "data.path=corpus"])
    {'steps': 3, 'data': {'path': 'corpus'}}
    """
    found: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        *tables, last = name.strip().split(".")
        if not equals or not all(part.isidentifier() for part in (*tables, last)):
            raise CommandError(f"--set is {text!r:.60}; write NAME=VALUE, such as steps=100 or data.path=corpus")
        table = found
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise CommandError(f"--set {name.strip()} is within a setting that --set gives as a whole; give one")
        table[last] = _value(value.strip())
    return found


def _value(text: str) -> Any:
    """What TOML reads in the text; the text itself where that is nothing."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def has_launcher(environment: Mapping[str, str]) -> bool:
    """Whether this process was started as one of several."""
    return "JAX_COORDINATOR_ADDRESS" in environment or environment.get("SLURM_NTASKS", "1") not in ("", "1")
