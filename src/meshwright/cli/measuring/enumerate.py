"""The `meshwright enumerate` command: every combination of a segment's strategies measured, and who predicts it."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.console import CommandError, Stages, give, note
from meshwright.cli.options import json_option
from meshwright.cli.plan import check_writable, function_of, machine_of
from meshwright.cli.request import Request, takes_request

MOST = 1000  # combinations; more are not measured unless a sample is asked for


@takes_request("model", "cluster", "args", "zoo")
def enumerate_command(
    segment: Annotated[int, typer.Option(help="The segment's number: see `meshwright blocks`.")],
    request: Request,
    sample: Annotated[int | None, typer.Option(help="Measure a random sample of so many combinations.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A web page with the plots.")] = None,
    json_path: Annotated[Path | None, json_option("the rows")] = None,
) -> None:
    """Measure every combination of a segment's strategies; tell how well bytes, price and profile predict them."""
    for path in (output, json_path):
        check_writable(path)
    machine = machine_of(request)
    stages = Stages()
    with redirect_stdout(sys.stderr), stages:  # what the user's code prints is no part of the answer
        function, arguments = function_of(request, stages, real=False)
        stages.say("finding blocks")
        _check_size(function, arguments, segment, sample)
        from meshwright.passes.enumeration import enumerate_segment
        from meshwright.profiler.measurements import open_database

        with open_database() as database:
            enumeration = enumerate_segment(
                function,
                *arguments,
                segment=segment,
                cluster=machine,
                database=database,
                sample=sample,
                model=request.model,
                say=stages.say,
            )
    if output is not None:
        from meshwright.passes.enumeration import write_page

        write_page(enumeration, output)
        note(f"wrote {output}")
    give(json_path, enumeration.to_json(), enumeration)


def _check_size(function: object, arguments: tuple[object, ...], segment: int, sample: int | None) -> None:
    from meshwright.blocks import find_blocks

    if sample is not None and sample < 2:
        raise CommandError(f"--sample is {sample}; give at least 2 combinations to compare")
    segments = find_blocks(function, *arguments).segments  # type: ignore[arg-type]
    if not 0 <= segment < len(segments):
        raise CommandError(f"--segment is {segment}; the model has segments 0 to {len(segments) - 1}")
    count = segments[segment].num_combinations
    if sample is None and count > MOST:
        raise CommandError(
            f"segment {segment} has {segments[segment].space} = {count} combinations, which is too many to measure: "
            f"add --sample 100, say, or choose another segment"
        )
