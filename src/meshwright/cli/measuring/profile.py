"""The group of commands `meshwright profile`: a model's passes, and the database of measurements."""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from meshwright.cli.console import CommandError, Stages, note, show, write_json
from meshwright.cli.measuring import measurements
from meshwright.cli.plan import function_of, machine_of
from meshwright.cli.request import Request, takes_request

if TYPE_CHECKING:
    from meshwright.hardware import Cluster


class _ModelOrWord(TyperGroup):
    """Takes a word that is none of its commands for a model: `meshwright profile gpt-tiny`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["model", *args]
        return super().parse_args(ctx, args)


profile_app = typer.Typer(
    cls=_ModelOrWord,
    help="Measure the segments of a model and plan with them; list, exchange and prune what was measured.",
    no_args_is_help=True,
)
FILES = {"analysis": "blocks.json", "profile": "measurements.json", "search": "strategies.json"}  # by pass
PASSES = tuple(FILES)


@profile_app.command("model")
@takes_request("model", "cluster", "args", "mesh", "zoo")
def model_command(
    *,
    only: Annotated[
        str | None, typer.Option("--pass", metavar="NAME", help=f"One pass alone: {', '.join(PASSES)}.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Write the blocks, measurements, strategies and the plan here.")
    ] = None,
    request: Request,
    seconds: Annotated[float, typer.Option(help="The time that measuring may take, in each pass.")] = 300.0,
    steps: Annotated[int, typer.Option(help="Steps of each of the three runs of the plan; 0 runs nothing.")] = 100,
) -> None:
    """Find the blocks of a model, measure its segments and plan with them; the word 'model' may be left out."""
    if only is not None and only not in PASSES:
        raise CommandError(f"--pass is {only!r}; give one of {', '.join(PASSES)}, or leave it out for all three")
    if not seconds > 0 or steps < 0:
        raise CommandError(f"--seconds is {seconds:g} and --steps is {steps}; give a time above 0, and 0 steps or more")
    wanted = PASSES if only is None else (only,)
    if folder is not None:
        _claim(folder, request.model)
    machine = machine_of(request) if wanted != ("analysis",) else None
    run_passes(request, machine, wanted, folder, seconds, steps)


def _claim(folder: Path, model: str) -> None:
    """Makes the folder, before anything is measured; refuses one that holds another model's passes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot write to {folder}: {error.strerror}; name a folder that can be made") from None
    if not os.access(folder, os.W_OK):
        raise CommandError(f"cannot write to {folder}: permission denied; choose another folder")
    for name in FILES.values():
        earlier_model = _model_of(folder / name)
        if earlier_model not in (None, model):
            raise CommandError(f"--folder {folder} holds {name} of {earlier_model}; choose another folder for {model}")


def _model_of(path: Path) -> str | None:
    """The model of a file that a pass wrote; None where there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data.get("model") if isinstance(data, dict) else None


def run_passes(
    request: Request, machine: "Cluster | None", wanted: Sequence[str], folder: Path | None, seconds: float, steps: int
) -> None:
    """Runs passes one after another, and prints and keeps what each found."""
    from meshwright.blocks import blocks_of
    from meshwright.graph import trace

    stages = Stages()
    with redirect_stdout(sys.stderr), stages:  # what the user's code prints is no part of the answer
        function, arguments = function_of(request, stages, real=False)
        stages.say("finding blocks")
        started = time.perf_counter()
        traced = trace(function, *arguments, cluster=machine)
        blocks = blocks_of(traced.graph, started)
    if "analysis" in wanted:
        _keep(folder, "analysis", request.model, blocks)
    if machine is None:
        return
    if "profile" in wanted:
        from meshwright.passes.profile import profile_segments
        from meshwright.profiler.measurements import open_database

        view = machine.mesh(request.mesh or (machine.num_devices,))
        with redirect_stdout(sys.stderr), stages, open_database() as database:
            profiled = profile_segments(traced, blocks, view, database, seconds, stages.say)
        _keep(folder, "profile", request.model, profiled)
    if "search" in wanted:
        from meshwright.passes.search import search_plan

        with redirect_stdout(sys.stderr), stages:
            best = search_plan(traced, blocks, machine, request.mesh, seconds, steps, stages.say)
        _keep(folder, "search", request.model, best)
        if folder is not None:
            from meshwright.export.dump import dump

            dump(best.plan, folder / "plan")
            note(f"wrote {folder / 'plan'}")


def _keep(folder: Path | None, name: str, model: str, found: Any) -> None:
    show(found)
    show("")
    if folder is not None:
        write_json(folder / FILES[name], {"model": model, **found.to_json()})


profile_app.command("list")(measurements.list_command)
profile_app.command("show")(measurements.show_command)
profile_app.command("export")(measurements.export_command)
profile_app.command("import")(measurements.import_command)
profile_app.command("prune")(measurements.prune_command)
