"""The constants of serving engines: which part of a chip's rates their kernels reach, and what their hosts take."""

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from meshwright.errors import ServingError
from meshwright.schema import built


@dataclass(frozen=True)
class EngineConstants:
    """What one kind of engine takes beyond the work itself; `engines.toml` says what set the figures.

    Attributes:
        compute: Part of the catalogue's rate that products with many tokens reach.
        float8: Further part of it that products of 8 bits reach.
        expert_compute: Further part of it that the products of experts reach, each with the tokens that chose it.
        tile: Rows that an expert's product computes at the least, however few tokens chose it.
        streaming: Part of the catalogue's memory rate at which weights are read.
        experts: Further part of it at which the weights of experts are read.
        cache: Part of it at which the cache is read.
        small_cache: Further part of it at which this package's kernel reads a cache of 8 bits.
        network: Times that a collective takes as long as by the catalogue.
        layer_s: Seconds of a layer in every step that no product, cache or collective explains; with `traced`, beside
            its small kernels.
        step_s: Seconds between two steps.
        sequence_s: Seconds of a step for each sequence that gets a token: sampling, and the host.
        request_s: Seconds between a request's arrival and the scheduler, and of its first token to the client.
        chunk: Tokens of prompts in one step, by default.
        benchmark: What measured it.
        stream: Tokens that are sent to a client at a time.
        all_experts: Whether every step reads the weights of all experts, whichever its tokens choose.
        every_token: Whether every expert computes every token, where tokens choose as many as there are or more.
        traced: Whether it is this package's: which small kernels its layers start is counted in the step itself, and
            gate and up are products of their own where a stage is split over devices.
    """

    compute: float
    float8: float
    expert_compute: float
    streaming: float
    experts: float
    cache: float
    network: float
    layer_s: float
    step_s: float
    sequence_s: float
    request_s: float
    chunk: int
    benchmark: str
    stream: int = 1
    all_experts: bool = False
    every_token: bool = False
    small_cache: float = 1.0
    tile: int = 1
    traced: bool = False


@lru_cache(maxsize=1)
def engines() -> dict[str, EngineConstants]:
    """All kinds of engines by name; ``"meshwright"`` is this package's own."""
    data = tomllib.loads(files("meshwright.serving.planning").joinpath("engines.toml").read_text(encoding="utf-8"))
    return {name: built(EngineConstants, fields, f"engines.toml, {name}") for name, fields in data.items()}


def find_engine(name: str) -> EngineConstants:
    """The constants of a kind of engine."""
    if name not in engines():
        raise ServingError(f"engine is {name!r}; give one of {', '.join(engines())}")
    return engines()[name]
