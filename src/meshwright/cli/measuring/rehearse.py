"""The `meshwright rehearse` command: runs one device's share of a plan on a device of this machine."""

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import meshwright
from meshwright.cli import plan as planning
from meshwright.cli.console import CommandError, Stages, give
from meshwright.cli.options import json_option
from meshwright.cli.request import Request, takes_request

_ModelOption = Annotated[str | None, typer.Option(help="What the plan is of: a model of the zoo, or module:function.")]


@takes_request("model", "args", "zoo", model=(_ModelOption, None))
def rehearse_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A saved plan.")],
    request: Request,
    steps: Annotated[int, typer.Option(min=0, help="Steps to time in each of three rounds; 0 only compiles.")] = 10,
    segments: Annotated[bool, typer.Option(help="Measure repeated parts of the program by themselves, too.")] = True,
    json_path: Annotated[Path | None, json_option("the figures")] = None,
) -> None:
    """Run one device's share of a saved plan on a device here: measured compute and memory, modelled communication."""
    planning.check_writable(json_path)
    from meshwright.zoo import names as zoo_names

    saved_plan = meshwright.Plan.load(plan)
    name = request.model or saved_plan.provenance.get("model")
    if not isinstance(name, str) or not name:
        raise CommandError(
            f"{plan} does not name its function: give --model with a model of the zoo or module:function"
        )
    if not request.model and ":" not in name and name not in zoo_names():
        raise CommandError(
            f"{plan} is of a function of your own, {name!r:.60}: say where it is with --model module:{name:.60} and "
            "--args module:name"
        )
    request = replace(request, model=name)
    stages = Stages()
    with redirect_stdout(sys.stderr), stages:  # what the user's code prints is no part of the answer
        function, arguments = planning.function_of(request, stages, real=False)
        stages.say("compiling and running one device's share")
        rehearsal = saved_plan.rehearse(function, *arguments, steps=steps, segments=segments)
    give(json_path, rehearsal.to_json(), rehearsal)
