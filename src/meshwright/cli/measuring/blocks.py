"""The `meshwright blocks` command: the blocks and segments of a model, as a table or as JSON."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.console import Stages, show, write_json
from meshwright.cli.options import (
    NO_OPTIONS,
    ArgsOption,
    ModelArgument,
    ZooOptions,
    takes_zoo_options,
)
from meshwright.cli.plan import Request, function_of

if TYPE_CHECKING:
    from meshwright.blocks import Blocks


@takes_zoo_options
def blocks_command(
    model: ModelArgument,
    args: ArgsOption = None,
    zoo: ZooOptions = NO_OPTIONS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Print the blocks of a model, whose split follows from one contraction each, and the segments that repeat."""
    request = model_request(model, args, zoo)
    with redirect_stdout(sys.stderr):  # what the user's code prints is no part of the answer
        blocks = find_model_blocks(request, Stages())
    write_json(Path("-"), blocks.to_json()) if as_json else show(blocks)


def model_request(model: str, args: str | None, zoo: ZooOptions, cluster: str = "local") -> Request:
    """A request for a model whose mesh and method are not asked for."""
    return Request(model=model, args=args, cluster=cluster, mesh=None, zoo=zoo, method="auto", memory_fraction=None)


def find_model_blocks(request: Request, stages: Stages) -> "Blocks":
    """The blocks of the requested model."""
    from meshwright.blocks import find_blocks

    with stages:
        function, arguments = function_of(request, stages, real=False)
        stages.say("finding blocks")
        return find_blocks(function, *arguments)
