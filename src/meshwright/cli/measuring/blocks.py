"""The `meshwright blocks` command: the blocks and segments of a model, as a table or as JSON."""

import sys
from contextlib import redirect_stdout
from pathlib import Path

from meshwright.cli.console import Stages, show, write_json
from meshwright.cli.options import JsonFlag
from meshwright.cli.plan import function_of
from meshwright.cli.request import Request, takes_request


@takes_request("model", "args", "zoo")
def blocks_command(request: Request, as_json: JsonFlag = False) -> None:
    """Print the blocks of a model, whose split follows from one contraction each, and the segments that repeat."""
    from meshwright.blocks import find_blocks

    stages = Stages()
    with redirect_stdout(sys.stderr), stages:  # what the user's code prints is no part of the answer
        function, arguments = function_of(request, stages, real=False)
        stages.say("finding blocks")
        blocks = find_blocks(function, *arguments)
    write_json(Path("-"), blocks.to_json()) if as_json else show(blocks)
