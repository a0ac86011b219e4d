"""The `meshwright explore` command: one model on several clusters, ranked by the user's objective."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import meshwright
from meshwright.cli import plan
from meshwright.cli.console import CommandError, Stages, give, note
from meshwright.cli.options import json_option
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
from meshwright.cli.request import Request, takes_request

if TYPE_CHECKING:
    from meshwright.serving.planning.promise import Slo
    from meshwright.serving.planning.traffic import Traffic


@takes_request("model", "args", "zoo", "microbatches", "recompute", "pipeline", "memory_fraction")
def explore_command(
    *,
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
    request: Request,
    price: PriceOption = None,
    picture: Annotated[Path | None, typer.Option(help="Draw speed against price as an SVG file.")] = None,
    json_path: Annotated[Path | None, json_option("the ranking", "it")] = None,
) -> None:
    """Which cluster to rent: plan and simulate a model on each, and rank them by price and speed."""
    for path in (json_path, picture):
        plan.check_writable(path)
    names = [name.strip() for name in (clusters or "").split(",") if name.strip()]
    if serve:
        load = traffic_of(rate, tokens_in, tokens_out, burstiness, trace)
        _explore_serving(
            request.model, load, meshwright.Slo(ttft, tpot, percentile), names, weights, price or [], json_path
        )
        return
    if not names:
        raise CommandError(f"--clusters is {clusters!r}; write some, such as '2x8 h100, 4x8 a100-80gb'")
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
    give(json_path, exploration.to_json(), exploration)


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
    give(json_path, offers.to_json(), offers)
