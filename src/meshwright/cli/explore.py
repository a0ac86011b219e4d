"""The `meshwright explore` command: one model on several clusters, ranked by the user's objective."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    RecomputeOption,
    ZooOptions,
    takes_zoo_options,
)
from meshwright.cli.plan_serving import (
    BurstinessOption,
    InOption,
    OutOption,
    PercentileOption,
    PriceOption,
    RateOption,
    TpotOption,
    TraceOption,
    TtftOption,
    WeightsOption,
    prices_of,
    traffic_of,
)

if TYPE_CHECKING:
    from meshwright.serving.planning.promise import Slo
    from meshwright.serving.planning.traffic import Traffic


@takes_zoo_options
def explore_command(
    model: ModelArgument,
    clusters: Annotated[
        str | None, typer.Option(help="Clusters with commas between them: '2x8 h100, 4x8 a100-80gb'.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the model: which machines for a load, at what price.")
    ] = False,
    rate: RateOption = None,
    ttft: TtftOption = None,
    tpot: TpotOption = None,
    percentile: PercentileOption = 0.99,
    tokens_in: InOption = "1024",
    tokens_out: OutOption = "256",
    burstiness: BurstinessOption = 1.0,
    trace: TraceOption = None,
    weights: WeightsOption = "bfloat16",
    objective: Annotated[
        str, typer.Option(help="tokens_per_dollar, tokens_per_s, step_s or mfu.")
    ] = "tokens_per_dollar",
    args: ArgsOption = None,
    zoo: ZooOptions = NO_OPTIONS,
    price: PriceOption = None,
    microbatches: MicrobatchesOption = "auto",
    recompute: RecomputeOption = "auto",
    pipeline: PipelineOption = "auto",
    memory_fraction: MemoryOption = None,
    picture: Annotated[Path | None, typer.Option(help="Draw speed against price as an SVG file.")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the ranking as JSON; '-' writes it to stdout and nothing else.")
    ] = None,
) -> None:
    """Which cluster to rent: plan and simulate a model on each, and rank them by price and speed."""
    for path in (json_path, picture):
        plan.check_writable(path)
    names = [name.strip() for name in (clusters or "").split(",") if name.strip()]
    if serve:
        load = traffic_of(rate, tokens_in, tokens_out, burstiness, trace)
        _explore_serving(model, load, meshwright.Slo(ttft, tpot, percentile), names, weights, price or [], json_path)
        return
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
        recompute=recompute,
        pipeline=plan.parse_pipeline(pipeline),
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
            method=plan.staged_method(request) or plan.method_of(request),
            prices=prices_of(price or []),
            on_progress=stages.say,
        )
    if picture is not None:
        exploration.save_picture(picture)
        note(f"wrote {picture}")
    if json_path is not None:
        write_json(json_path, exploration.to_json())
    if str(json_path) != "-":
        show(exploration)


def _explore_serving(
    model: str,
    load: "Traffic",
    slo: "Slo",
    names: list[str],
    weights: str,
    price: list[str],
    json_path: Path | None,
) -> None:
    """Which machines serve a load most cheaply."""
    from meshwright.serving.planning.offers import USUAL, explore_serving

    offers = explore_serving(model, load, slo, names or USUAL, prices_of(price), weights=weights)
    if json_path is not None:
        write_json(json_path, offers.to_json())
    if str(json_path) != "-":
        show(offers)
