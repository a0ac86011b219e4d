"""The `meshwright explore` command: one model on several clusters, ranked by the user's objective."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

import meshwright
from meshwright.cli import plan
from meshwright.cli.console import CommandError, Stages, note, show, write_json
from meshwright.cli.options import (
    NO_OPTIONS,
    ArgsOption,
    MemoryOption,
    MicrobatchesOption,
    ModelArgument,
    PipelineOption,
    ZooOptions,
    takes_zoo_options,
)


@takes_zoo_options
def explore_command(
    model: ModelArgument,
    clusters: Annotated[str, typer.Option(help="Clusters with commas between them: '2x8 h100, 4x8 a100-80gb'.")],
    objective: Annotated[
        str, typer.Option(help="tokens_per_dollar, tokens_per_s, step_s or mfu.")
    ] = "tokens_per_dollar",
    args: ArgsOption = None,
    zoo: ZooOptions = NO_OPTIONS,
    price: Annotated[
        list[str] | None, typer.Option(help="Your price of a device and hour: h100=2.50. May be given several times.")
    ] = None,
    microbatches: MicrobatchesOption = "auto",
    pipeline: PipelineOption = None,
    memory_fraction: MemoryOption = None,
    picture: Annotated[Path | None, typer.Option(help="Draw speed against price as an SVG file.")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the ranking as JSON; '-' writes it to stdout and nothing else.")
    ] = None,
) -> None:
    """Which cluster to rent: plan and simulate a model on each, and rank them by price and speed."""
    for path in (json_path, picture):
        plan.check_writable(path)
    names = [name.strip() for name in clusters.split(",") if name.strip()]
    if not names:
        raise CommandError(f"--clusters is {clusters!r}; write some, such as '2x8 h100, 4x8 a100-80gb'")
    request = plan.Request(
        model=model,
        args=args,
        cluster=names[0],
        mesh=None,
        zoo=zoo,
        method="auto",
        memory_fraction=memory_fraction,
        microbatches=plan.parse_microbatches(microbatches),
        pipeline=pipeline,
    )
    machines = [meshwright.cluster(name) for name in names]
    stages = Stages()
    with redirect_stdout(sys.stderr), stages:  # what the user's code prints is no part of the answer
        function, arguments = plan.function_of(request, stages, real=False)
        exploration = meshwright.explore(
            function,
            arguments,
            clusters=machines,
            objective=objective,
            method=plan.staged_method(request) or plan.method_of("auto", memory_fraction, request.microbatches),
            prices=_prices(price or []),
            on_progress=stages.say,
        )
    if picture is not None:
        exploration.save_picture(picture)
        note(f"wrote {picture}")
    if json_path is not None:
        write_json(json_path, exploration.to_json())
    if str(json_path) != "-":
        show(exploration)


def _prices(texts: list[str]) -> dict[str, float]:
    """Reads ``h100=2.50``."""
    dollars_of = {}
    for text in texts:
        chip, _, dollars = text.partition("=")
        try:
            dollars_of[chip.strip()] = float(dollars)
        except ValueError:
            raise CommandError(f"--price is {text!r}; write CHIP=DOLLARS, such as h100=2.50") from None
    return dollars_of
