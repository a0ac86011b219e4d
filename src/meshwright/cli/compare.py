"""The `meshwright compare` command: several methods for one function, priced alike and, on request, run here."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli import plan
from meshwright.cli.console import CommandError, Stages, give
from meshwright.cli.options import METHOD_NAMES, json_option
from meshwright.cli.request import Request, takes_request
from meshwright.errors import ShardingError

_MeshOption = Annotated[str | None, typer.Option(help="One mesh view for all methods, instead of each one's own.")]


@takes_request(
    *("model", "cluster", "args", "mesh", "zoo", "microbatches", "recompute", "memory_fraction"),
    mesh=(_MeshOption, None),
)
def compare_command(
    request: Request,
    methods: Annotated[str, typer.Option(help="The methods, with commas between them.")] = ",".join(METHOD_NAMES),
    steps: Annotated[int, typer.Option(help="Compile, and time this many steps on the devices here.")] = 0,
    json_path: Annotated[Path | None, json_option("the rows")] = None,
) -> None:
    """Compare methods for a model or a function of your own: step time, memory and bytes sent."""
    plan.check_writable(json_path)
    if steps < 0:
        raise CommandError(f"--steps is {steps}; give how many steps to time, 0 to price the methods only")
    from meshwright.planner.method_names import find_methods

    try:
        chosen = find_methods(methods)
    except ShardingError as error:
        raise CommandError(f"--methods: {error}") from None
    machine, stages = plan.machine_of(request), Stages()
    with redirect_stdout(sys.stderr), stages:  # what the user's code prints is no part of the answer
        function, args = plan.function_of(request, stages, real=steps > 0)
        from meshwright.training.compare import compare

        comparison = compare(
            function,
            *args,
            methods=[plan.with_options(method, request) for method in chosen],
            cluster=machine,
            mesh=None if request.mesh is None else machine.mesh(request.mesh),
            steps=steps,
            run=steps > 0,
            on_progress=stages.say,
        )
    give(json_path, comparison.to_json(), comparison)
