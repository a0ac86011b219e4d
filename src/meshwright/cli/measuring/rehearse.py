"""The `meshwright rehearse` command: runs one device's share of a plan on a device of this machine."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

import meshwright
from meshwright.cli import plan as planning
from meshwright.cli.console import CommandError, Stages, show, write_json
from meshwright.cli.options import (
    NO_OPTIONS,
    ArgsOption,
    ZooOptions,
    takes_zoo_options,
)


@takes_zoo_options
def rehearse_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A saved plan.")],
    model: Annotated[
        str | None, typer.Option(help="What the plan is of: a model of the zoo, or module:function.")
    ] = None,
    args: ArgsOption = None,
    zoo: ZooOptions = NO_OPTIONS,
    steps: Annotated[int, typer.Option(min=0, help="Steps to time in each of three rounds; 0 only compiles.")] = 10,
    segments: Annotated[bool, typer.Option(help="Measure repeated parts of the program by themselves, too.")] = True,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures as JSON; '-' writes them to stdout only.")
    ] = None,
) -> None:
    """Run one device's share of a saved plan on a device here: measured compute and memory, modelled communication."""
    planning.check_writable(json_path)
    from meshwright.zoo import names as zoo_names

    saved_plan = meshwright.Plan.load(plan)
    name = model or saved_plan.provenance.get("model")
    if not isinstance(name, str) or not name:
        raise CommandError(
            f"{plan} does not name its function: give --model with a model of the zoo or module:function"
        )
    if model is None and ":" not in name and name not in zoo_names():
        raise CommandError(
            f"{plan} is of a function of your own, {name!r:.60}: say where it is with --model module:{name:.60} and "
            "--args module:name"
        )
    request = planning.Request(
        model=name,
        args=args,
        cluster="local",
        mesh=None,
        zoo=zoo,
        method="auto",
        memory_fraction=None,
    )
    stages = Stages()
    with redirect_stdout(sys.stderr), stages:  # what the user's code prints is no part of the answer
        function, arguments = planning.function_of(request, stages, real=False)
        stages.say("compiling and running one device's share")
        rehearsal = saved_plan.rehearse(function, *arguments, steps=steps, segments=segments)
    if json_path is not None:
        write_json(json_path, rehearsal.to_json())
    if str(json_path) != "-":
        show(rehearsal)
