"""The `meshwright plan-serving` command, and the options by which loads and promises are given."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.console import CommandError, give, note
from meshwright.cli.options import ClusterOption, json_option

if TYPE_CHECKING:
    from meshwright.serving.planning.traffic import Traffic

RateOption = Annotated[float | None, typer.Option(help="Requests a second.")]
TtftOption = Annotated[float | None, typer.Option(help="Promise: most seconds to the first token.")]
TpotOption = Annotated[float | None, typer.Option(help="Promise: most seconds for each later token.")]
PercentileOption = Annotated[float, typer.Option(help="Share of requests that keep the promise.")]
InOption = Annotated[str, typer.Option("--tokens-in", help="Tokens of a prompt: 1024, or 500-1500 for all between.")]
OutOption = Annotated[str, typer.Option("--tokens-out", help="Tokens of an answer, likewise.")]
BurstinessOption = Annotated[float, typer.Option(help="1 for a Poisson process, more for bursts.")]
TraceOption = Annotated[
    Path | None, typer.Option("--trace", help="A file of requests: CSV or lines of JSON with arrival_s, tokens_in, …")
]
WeightsOption = Annotated[str, typer.Option(help="Type of the weights: bfloat16, float8, int8, int4 or float4.")]
CacheOption = Annotated[str, typer.Option(help="Type of keys and values; 'auto' for whichever serves more.")]
PriceOption = Annotated[
    list[str] | None, typer.Option(help="Your price of a device and hour: h100=2.50. May be given several times.")
]


def plan_serving_command(
    model: Annotated[str, typer.Argument(help="A model of the zoo, or the folder of a checkpoint of Hugging Face.")],
    cluster: ClusterOption = "local",
    rate: RateOption = None,
    ttft: TtftOption = None,
    tpot: TpotOption = None,
    percentile: PercentileOption = 0.99,
    tokens_in: InOption = "1024",
    tokens_out: OutOption = "256",
    burstiness: BurstinessOption = 1.0,
    trace: TraceOption = None,
    objective: Annotated[
        str, typer.Option(help="goodput for the most requests, cost for the fewest devices.")
    ] = "goodput",
    weights: WeightsOption = "bfloat16",
    cache: CacheOption = "bfloat16",
    price: PriceOption = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the simulated load for ui.perfetto.dev: steps, batch, queue and cache.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a web page: the plan, latencies as distributions, and a timeline.")
    ] = None,
    json_path: Annotated[Path | None, json_option("the plan", "it")] = None,
) -> None:
    """How to serve a language model: replicas, batch and cache that keep a promise under a load."""
    import meshwright as mw

    load = traffic_of(rate, tokens_in, tokens_out, burstiness, trace)
    slo = mw.Slo(ttft, tpot, percentile)
    chosen = None if cache == "auto" else cache
    planned = mw.plan_serving(
        model, cluster, load, slo, objective=objective, weights=weights, cache=chosen, prices=prices_of(price or [])
    )
    outcome = planned.simulate(load.at(min(load.mean_rate, planned.goodput)))
    if timeline is not None:
        outcome.save_timeline(timeline)
        note(f"wrote {timeline}")
    if report is not None:
        planned.report(report, outcome)
        note(f"wrote {report}")
    give(json_path, planned.to_json() | {"simulated": outcome.to_json()}, planned, outcome)


def traffic_of(rate: float | None, tokens_in: str, tokens_out: str, burstiness: float, trace: Path | None) -> "Traffic":
    """The load that options say."""
    import meshwright as mw

    if rate is None and trace is None:
        raise CommandError("--rate is missing; write the requests a second, such as --rate 20, or give a --trace")
    lengths = _lengths("--tokens-in", tokens_in), _lengths("--tokens-out", tokens_out)
    return mw.Traffic(rate, *lengths, burstiness=burstiness, trace=trace)


def prices_of(texts: list[str]) -> dict[str, float]:
    """Reads ``h100=2.50``."""
    dollars_of = {}
    for text in texts:
        chip, _, dollars = text.partition("=")
        try:
            dollars_of[chip.strip()] = float(dollars)
        except ValueError:
            raise CommandError(f"--price is {text!r}; write CHIP=DOLLARS, such as h100=2.50") from None
    return dollars_of


def _lengths(option: str, text: str) -> int | tuple[int, int]:
    """Reads ``1024`` or ``500-1500``."""
    least, dash, most = text.partition("-")
    try:
        return (int(least), int(most)) if dash else int(least)
    except ValueError:
        raise CommandError(f"{option} is {text!r}; write a number of tokens such as 1024, or 500-1500") from None
