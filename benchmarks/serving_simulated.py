"""Does the simulation say what serving engines were measured to take, per token and to the first token?

Every row of `serving_measured.csv` is a closed loop: so many clients, each of which sends its next request when the
last one has ended. It is simulated with the scheduler of this package and the steps of `serving/planning/prices.py`.
Engines differ by the constants of `engines.toml`, which a quarter of the rows set (those whose identifier's checksum is
a multiple of four: `--rows told`); the others are set aside.

What the columns do not say was read from the measurements and is stated in `SOURCES`: a cache of 8 bits, tokens sent to
clients sixteen at a time (the first then comes after sixteen steps), one slot fewer than clients, and weights of all
experts read in every step. What cannot be expressed is listed above the table, not fitted.

    python benchmarks/serving_simulated.py [--rows told|aside|all] [--every N] [--jobs 2] [--worst 10]
    python benchmarks/serving_simulated.py --published    # rows of serving_published.csv, priced in a steady state
"""

import argparse
import csv
import os
import statistics
import zlib
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from report import table

import meshwright as mw
from meshwright.serving.planning.candidates import assess
from meshwright.serving.planning.decoder_work import decoder_work
from meshwright.serving.planning.engine_constants import find_engine
from meshwright.serving.planning.prices import StepPrices
from meshwright.serving.planning.split import Degrees, Storage
from meshwright.serving.planning.traffic import Arrival
from meshwright.serving.scheduling import Limits
from meshwright.serving.simulation.replica import Replica
from meshwright.serving.simulation.simulate import Simulation
from meshwright.zoo.catalogue import names

#: Requests that each client sends in turn; the sources send ten, of which the first finds an empty engine.
_TURNS, _SENT = 4, 10
#: Lengths of the sources' requests are spread over the upper fifth of what the columns say, so that clients do not stay
#: in step.
_SPREAD = 0.2
_WEIGHTS = {"": "bfloat16", "fp8": "float8", "fp4": "float4"}


@dataclass(frozen=True)
class Source:
    """One collection of rows.

    Attributes:
        model: The model in the zoo.
        engine: The kind of engine.
        cache: The type of keys and values.
        stream: Tokens that are sent to a client at a time.
        slots: By how many slots the engine has more than there are clients; None for as many as it likes.
        all_experts: Whether every step reads the weights of all experts.
        leaves_out: Rows that cannot be expressed, as a sentence.
    """

    model: str
    engine: str
    cache: str = "bfloat16"
    stream: int = 1
    slots: int | None = None
    all_experts: bool = False
    leaves_out: str = ""


SOURCES = {
    ("trtllm", "Llama-3.1-8B-Instruct"): Source(
        "llama3.1-8b",
        "tensorrt-llm",
        slots=-1,
        leaves_out="64 clients and more on 4 devices and more: neither time follows the load; the front end is full",
    ),
    ("vllm", "Qwen3-32B"): Source("qwen3-32b", "vllm", leaves_out="float8: prompts are found in the cache"),
    ("vllm", "gpt-oss-120b"): Source("gpt-oss-120b", "vllm"),
    ("vllm", "Llama-3.1-70B"): Source("llama3.1-70b", "vllm", cache="float8"),
    ("vllm", "Qwen3-235B-A22B-FP8"): Source("qwen3-235b-a22b", "vllm", all_experts=True),
    ("trtllm", "DeepSeek-V3"): Source("deepseek-v3", "tensorrt-llm", stream=16),
}


def told(row: dict[str, str]) -> bool:
    """Whether a row may set constants."""
    return zlib.crc32(row["id"].encode()) % 4 == 0


def source_of(row: dict[str, str]) -> tuple[str, str]:
    return row["backend"], row["model_path"].split("/")[1]


def expressible(row: dict[str, str]) -> bool:
    """Whether a row is one of those that a source leaves out."""
    name = source_of(row)[1]
    if name == "Llama-3.1-8B-Instruct":
        return not (int(row["batch_size"]) >= 64 and int(row["tp_size"]) >= 4)
    return not (name == "Qwen3-32B" and row["precision"])


def degrees(row: dict[str, str]) -> Degrees:
    """The split that the columns say; rows of 64 devices take what those of 8 take and are read as these."""
    tensor, data = int(row["tp_size"]), int(row["attention_dp_size"] or 1)
    parts, experts = int(row["moe_tp_size"]), int(row["moe_ep_size"])
    if not decoder_work(SOURCES[source_of(row)].model).num_experts:
        return Degrees(tensor)
    if data > 1:
        return Degrees(1, 1, 8, 8)
    group = min(8, max(1, parts * experts))
    return Degrees(min(tensor, group), 1, max(1, group // min(tensor, group)), min(experts, group))


def simulated(row: dict[str, str]) -> tuple[float, float]:
    """Seconds to the first token and for each later one, in the mean over all requests of a row."""
    source, split = SOURCES[source_of(row)], degrees(row)
    engine = replace(find_engine(source.engine), stream=source.stream, all_experts=source.all_experts)
    machines = mw.cluster(f"1x8 {row['system'][:4]}")
    storage = Storage(_WEIGHTS[row["precision"]], source.cache)
    prices = StepPrices(decoder_work(source.model), machines, split, storage, engine)
    clients = int(row["batch_size"]) * int(row["attention_dp_size"] or 1)
    into, out = int(row["isl"]), int(row["osl"])
    slots = 256 + clients if source.slots is None else max(1, clients + source.slots)
    chunk = engine.chunk
    limits = Limits(slots, 16, max(1, prices.room // 16), chunk, chunk + slots, 10**6, into + out)
    draw = np.random.default_rng(0)
    shortest = 1 - _SPREAD
    requests = [
        Arrival(
            0.0,
            *(int(draw.integers(int(most * shortest), most + 1)) for most in (into, out)),
        )
        for _ in range(max(_TURNS * clients, 16))
    ]
    outcome = Simulation([Replica(prices, limits)], mw.Slo()).serve(requests, clients=clients)
    begins, goes_on = outcome.requests[:clients], outcome.requests[clients:]
    first_s = statistics.mean(r.ttft_s for r in begins) / _SENT
    first_s += statistics.mean(r.ttft_s for r in goes_on) * (1 - 1 / _SENT)
    return first_s, statistics.mean(r.tpot_s for r in goes_on)


def errors(row: dict[str, str]) -> tuple[float, float]:
    """Simulated over measured, less 1."""
    first_s, token_s = simulated(row)
    return (
        first_s * 1e3 / float(row["silicon_ttft_ms"]) - 1,
        token_s * 1e3 / float(row["silicon_tpot_ms"]) - 1,
    )


#: Engines of published rows by how their names begin; the others have no constants and are left out.
PUBLISHED_ENGINES = {
    "TensorRT-LLM": "tensorrt-llm",
    "trtllm": "tensorrt-llm",
    "vllm": "vllm",
}
PUBLISHED_ENGINES |= dict.fromkeys(("sglang-jax", "pure JAX", "torch.compile"), "meshwright")


def published(row: dict[str, str]) -> tuple[float, float] | None:
    """A published figure and the same by prices: tokens a second of offline rows, else milliseconds for each token.

    Both are of a steady state: as many sequences as the row says, or as fit, and in every step the prompts of as many
    new ones as end. None for rows of data sets, of phases apart, and of engines without constants.
    """
    engine = next(
        (kind for start, kind in PUBLISHED_ENGINES.items() if row["engine"].startswith(start)),
        None,
    )
    if engine is None or not (row["isl"].isdigit() and row["osl"].isdigit()) or int(row["osl"]) < 2:
        return None
    narrow = {"fp8": "float8", "int8": "int8", "mxfp4": "float4"}
    weights = next(
        (name for start, name in narrow.items() if row["precision"].startswith(start)),
        "bfloat16",
    )
    storage = Storage(weights, weights if weights in ("float8", "int8") else "bfloat16")
    split = Degrees(int(row["tp"] or 1))
    machines = mw.cluster(f"{max(1, split.num_devices // 8)}x8 {row['hardware'].split('(')[0].strip()}")
    prices = StepPrices(decoder_work(row["model"]), machines, split, storage, find_engine(engine))
    into, out = int(row["isl"]), int(row["osl"])
    if row["batch_or_concurrency"] == "max":
        load = mw.Traffic(rate=1, tokens_in=into, tokens_out=out)
        most = assess(prices, load, mw.Slo(), "both", into + out)
        return (float(row["output_tok_s_total"]), most.rate * out) if most is not None else None
    if not row["tpot_ms"]:
        return None
    batch, begins = (
        int(row["batch_or_concurrency"]),
        0.0 if row["mode"].startswith("static") else 1 / out,
    )
    pairs = batch * begins * into * into / 2
    tokens, context = batch * (1 + begins * into), batch * (into + out / 2)
    return float(row["tpot_ms"]), prices.step_s(tokens, batch * (1 + begins), context, pairs) * 1e3


def print_published(path: Path) -> None:
    """Prints all published rows that prices have a figure for."""
    lines = []
    for row in csv.DictReader(path.open()):
        if row["model"] not in names():
            continue
        pair = published(row)
        if pair is not None:
            what = "tokens/s" if row["batch_or_concurrency"] == "max" else "ms per token"
            name = f"{row['id']}: {row['model']} {row['precision'].split('(')[0]}, {row['tp']} × {row['hardware']}"
            about = f"{row['engine']}, {row['isl']} in, {row['osl']} out, {row['batch_or_concurrency']} at once"
            lines.append(
                [
                    name,
                    about,
                    f"{pair[0]:,.4g} {what}",
                    f"{pair[1]:,.4g}",
                    f"{pair[1] / pair[0] - 1:+.0%}",
                ]
            )
    header = ("row", "engine and load", "published", "priced", "error")
    table(
        "Serving published",
        "Published figures of engines, and the same by prices in a steady state",
        header,
        lines,
    )


def main() -> None:
    """Simulates the rows and prints the errors by source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", choices=("told", "aside", "all"), default="aside")
    parser.add_argument("--every", type=int, default=1, help="only every so manyth row")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--worst", type=int, default=0, help="print so many of the worst rows")
    parser.add_argument(
        "--published",
        action="store_true",
        help="price the rows of serving_published.csv instead",
    )
    asked = parser.parse_args()
    folder = Path(os.environ.get("MESHWRIGHT_DATA", "data"))
    if asked.published:
        print_published(folder / "serving_published.csv")
        return
    path = folder / "serving_measured.csv"
    unlike = {tuple(v for k, v in row.items() if k != "id"): row for row in csv.DictReader(path.open())}
    rows = [row for row in unlike.values() if asked.rows == "all" or told(row) == (asked.rows == "told")]
    rows = rows[:: asked.every]
    kept = [row for row in rows if expressible(row)]
    with ProcessPoolExecutor(asked.jobs) as pool:
        found = list(pool.map(errors, kept, chunksize=4))
    by_source = defaultdict(list)
    for row, error in zip(kept, found, strict=True):
        by_source[source_of(row)].append(error)
    lines = [_line(" ".join(source), pairs) for source, pairs in by_source.items()]
    question = (
        f"{asked.rows} rows, {len(kept)} of {len(rows)}; left out are rows that cannot be expressed: "
        + "; ".join(f"{name[1]}: {source.leaves_out}" for name, source in SOURCES.items() if source.leaves_out)
    )
    header = (
        "source",
        "rows",
        *(f"{what}, {how}" for what in ("per token", "first") for how in ("mean", "median", "bias")),
    )
    table("Serving simulated", question, header, [*lines, _line("all", found)])
    ranked = sorted(zip(kept, found, strict=True), key=lambda pair: -abs(pair[1][1]))
    for row, (first, token) in ranked[: asked.worst]:
        print(f"{row['id']}: first {first:+.0%}, per token {token:+.0%}")


def _line(name: str, pairs: Sequence[tuple[float, float]]) -> list[str]:
    cells = []
    for column in (1, 0):
        values = [pair[column] for pair in pairs]
        sizes = [abs(value) for value in values]
        cells += [
            f"{statistics.mean(sizes):.1%}",
            f"{statistics.median(sizes):.1%}",
            f"{statistics.mean(values):+.1%}",
        ]
    return [name, str(len(pairs)), *cells]


if __name__ == "__main__":
    main()
