"""The `meshwright enumerate` command: every combination of a segment's strategies measured, and who predicts it."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.console import CommandError, Stages, note, show, write_json
from meshwright.cli.measuring.blocks import model_request
from meshwright.cli.options import (
    NO_OPTIONS,
    ArgsOption,
    ClusterOption,
    ModelArgument,
    ZooOptions,
    takes_zoo_options,
)
from meshwright.cli.plan import check_writable, function_of, machine_of

MOST = 1000  # combinations; more are not measured unless a sample is asked for


@takes_zoo_options
def enumerate_command(
    model: ModelArgument,
    segment: Annotated[int, typer.Option(help="The segment's number: see `meshwright blocks`.")],
    cluster: ClusterOption = "local",
    args: ArgsOption = None,
    zoo: ZooOptions = NO_OPTIONS,
    sample: Annotated[int | None, typer.Option(help="Measure a random sample of so many combinations.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A web page with the plots.")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the rows as JSON; '-' writes them to stdout and nothing else.")
    ] = None,
) -> None:
    """Measure every combination of a segment's strategies; tell how well bytes, price and profile predict them."""
    for path in (output, json_path):
        check_writable(path)
    request = model_request(model, args, zoo, cluster)
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
                model=model,
                say=stages.say,
            )
    if output is not None:
        from meshwright.passes.enumeration import write_page

        write_page(enumeration, output)
        note(f"wrote {output}")
    if json_path is not None:
        write_json(json_path, enumeration.to_json())
    if str(json_path) != "-":
        show(enumeration)


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
