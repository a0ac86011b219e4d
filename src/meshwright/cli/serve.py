"""The `meshwright serve` command: a model behind OpenAI's interface."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.console import CommandError
from meshwright.cli.options import ClusterOption, MethodOption
from meshwright.cli.plan_serving import (
    BurstinessOption,
    InOption,
    OutOption,
    TpotOption,
    TraceOption,
    TtftOption,
    traffic_of,
)

if TYPE_CHECKING:
    from meshwright.serving.planning.traffic import Traffic


def serve_command(
    model: Annotated[Path, typer.Argument(help="The folder of a model of Hugging Face.", show_default=False)],
    host: Annotated[str, typer.Option(help="The address to listen at; by default only this machine reaches it.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name for clients.  [default: the folder's]")] = None,
    api_key: Annotated[
        str, typer.Option(envvar="MESHWRIGHT_API_KEY", help="A key that clients must send.", show_default=False)
    ] = "",
    cluster: ClusterOption = "local",
    method: MethodOption = "auto",
    ttft: TtftOption = None,
    tpot: TpotOption = None,
    dtype: Annotated[str | None, typer.Option(help="What is computed in.  [default: the checkpoint's]")] = None,
    max_len: Annotated[int | None, typer.Option(help="The most tokens of a text with its prompt.")] = None,
    slots: Annotated[int | None, typer.Option(help="The most texts at once.  [default: what memory allows]")] = None,
    chunk: Annotated[int | None, typer.Option(help="The most tokens of prompts in one step.")] = None,
    blocks: Annotated[int | None, typer.Option(help="Blocks of the cache.  [default: what memory allows]")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a block.")] = None,
    queue: Annotated[int | None, typer.Option(help="The most requests that wait; more are told to come again.")] = None,
    cache: Annotated[
        str | None, typer.Option(help="paged or slots.  [default: slots on GPUs, paged elsewhere]")
    ] = None,
    cache_dtype: Annotated[
        str | None, typer.Option(help="int8 or float8 keeps keys and values in 8 bits.  [default: the model's type]")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Copies of the model, each on a share of the devices.  [default: 1]")
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="Stages of layers in each copy.  [default: as few as it fits in]")
    ] = None,
    apart: Annotated[
        tuple[int, int] | None,
        typer.Option(help="How many copies compute prompts, and how many answers.", metavar="N N", show_default=False),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second: copies, stages and batch are planned for this load.")
    ] = None,
    tokens_in: InOption = "1024",
    tokens_out: OutOption = "256",
    burstiness: BurstinessOption = 1.0,
    trace: TraceOption = None,
    drain: Annotated[
        float, typer.Option(help="Seconds that open requests have to end after SIGTERM or Ctrl-C.")
    ] = 30.0,
) -> None:
    """Serve a model: completions and conversations as OpenAI's clients ask for them, figures, and a status page."""
    try:
        from meshwright.hf.tokenizer import read_tokenizer
        from meshwright.serving.server import Recipe, ServerSettings, serve
    except ImportError as error:
        raise CommandError(str(error)) from None
    from meshwright.hf.files import folder_of
    from meshwright.serving.planning.promise import Slo

    folder = folder_of(model)
    called = name or folder.resolve().name
    settings = ServerSettings(name=called, host=host, port=port, api_key=api_key, drain_s=drain)
    sizes = {"max_len": max_len, "slots": slots, "chunk": chunk, "blocks": blocks, "block_size": block_size}
    options: dict[str, object] = {"path": str(folder), "cluster": cluster, "method": method}
    options |= {"sizes": sizes | {"queue": queue, "cache": cache, "cache_dtype": cache_dtype}}
    options |= {"slo": None if ttft is None and tpot is None else Slo(ttft, tpot)}
    options |= {"replicas": replicas, "stages": stages, "apart": apart}
    options |= {"traffic": _load(rate, tokens_in, tokens_out, burstiness, trace)}
    if dtype is not None:
        options["dtype"] = dtype
    serve(Recipe("meshwright.serving.loading:load_engine", options), read_tokenizer(folder), settings)


def _load(
    rate: float | None, tokens_in: str, tokens_out: str, burstiness: float, trace: Path | None
) -> "Traffic | None":
    """The load that the server is planned for; None where there is none."""
    if rate is not None or trace is not None:
        return traffic_of(rate, tokens_in, tokens_out, burstiness, trace)
    if (tokens_in, tokens_out, burstiness) != ("1024", "256", 1.0):
        raise CommandError("--tokens-in, --tokens-out and --burstiness describe a load; give its --rate, too")
    return None
