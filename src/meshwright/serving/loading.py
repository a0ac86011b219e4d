"""From a folder of Hugging Face to an engine that runs; what the server's worker and `mw.get_model` share."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import ServingError
from meshwright.facade import Plan
from meshwright.hardware import Cluster
from meshwright.hardware.load import is_local
from meshwright.hf.files import folder_of, read_json
from meshwright.hf.model import load
from meshwright.parallelism.sentence import plain_sentence
from meshwright.planner.methods import Method
from meshwright.planning import plan
from meshwright.profiler import cluster as find_cluster
from meshwright.progress import Say, progress
from meshwright.runtime.placement import argument_shardings
from meshwright.serving.engine import Engine, Placement
from meshwright.serving.models import Decoder, StepShape
from meshwright.serving.planning.prices import StepPrices
from meshwright.serving.planning.promise import Slo
from meshwright.serving.promised import keeping, step_prices
from meshwright.serving.scheduling import Limits
from meshwright.serving.sizes import Sizes, chosen
from meshwright.units import format_bytes, format_seconds
from meshwright.zoo.layers import PyTree


@dataclass(frozen=True)
class ModelPlan:
    """How a model is served: where its parameters and its cache are, and what the two kinds of step cost.

    Both kinds use one layout, since they share the parameters and the cache: it is planned for the step of running
    sequences, of which there are many for each prompt.

    Attributes:
        decoder: The model with its cache.
        limits: What requests share.
        prices: What steps cost by the cost model of serving.
        cluster: What it is planned for; None for the devices at hand.
        method: How it is split.
    """

    decoder: Decoder
    limits: Limits
    prices: StepPrices
    cluster: Cluster | None
    method: Method | str | None

    @cached_property
    def decode(self) -> Plan:
        """The plan of a step in which all slots generate."""
        return self._plan(StepShape(self.limits.slots, 0, 0, False, self._width), self.method)

    @cached_property
    def prefill(self) -> Plan:
        """The plan of a step that computes one chunk of a prompt beside one running sequence."""
        return self._plan(StepShape(1, 1, self.limits.chunk, False, self._width), self.method)

    @property
    def _width(self) -> int:
        return self.decoder.cache.width(self.limits.max_len)

    def _plan(self, shape: StepShape, method: Method | str | None) -> Plan:
        whole = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (self.limits.slots, shape.size)]
        step = partial(self.decoder.step, shape)

        def decode_step(params: PyTree, cache: PyTree, last: PyTree, packed: PyTree) -> PyTree:
            return step(params, cache, last, packed)

        arguments = (self.decoder.params(), self.decoder.arrays(), *whole)
        return plan(decode_step, *arguments, cluster=self.cluster, method=method)

    def placement(self) -> Placement:
        """Where the plan of running sequences puts parameters and cache."""
        found = self.decode
        if found.stages:
            raise ServingError("the plan has stages, and the engine runs steps whole; give a method without a pipeline")
        shardings = argument_shardings(found)
        leaves, tree = jax.tree.flatten((self.decoder.params(), self.decoder.arrays()))
        params, arrays = jax.tree.unflatten(tree, shardings[: len(leaves)])
        mesh = shardings[0].mesh
        return Placement(params, arrays, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))

    def __str__(self) -> str:
        config, limits, prices, context = self.decoder.config, self.limits, self.prices, self.limits.max_len // 2
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.decoder.params()))
        cache = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.decoder.arrays()))
        return "\n".join(
            [
                f"{format_bytes(size)} of parameters in {config.dtype}, used in the dtype they are stored in",
                f"{format_bytes(cache)} of cache: {self.decoder.cache.described}",
                f"at most {limits.slots} sequences of {limits.max_len} tokens at once, {limits.chunk} tokens of "
                f"prompts in a step beside them, {limits.queue} requests in the queue",
                f"running sequences: {plain_sentence(self.decode)}",
                f"prompts: {plain_sentence(self.prefill)}",
                f"predicted at a context of {context}: {format_seconds(prices.decode_s(1, context))} a token with one "
                f"sequence, {format_seconds(prices.decode_s(limits.slots, context))} with {limits.slots}; "
                f"{format_seconds(prices.prefill_s(limits.chunk))} for {limits.chunk} tokens of a prompt",
            ]
        )


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to serve."""

    engine: Engine
    plan: ModelPlan
    pad: int


def load_model(
    path: str | PathLike[str],
    *,
    cluster: Cluster | str = "local",
    method: Method | str | None = None,
    slo: Slo | None = None,
    sizes: Sizes | None = None,
    on_progress: Say | None = None,
    **options: Any,
) -> Loaded:
    """Loads a model, plans it where there are several devices, and compiles its steps.

    Args:
        path: The folder of the model.
        cluster: What `mw.plan` takes; the local devices by default.
        method: How it is split over several devices, such as ``"tp"``; `mw.Auto()` by default.
        slo: What steps are to keep to; by default nothing is promised.
        sizes: What requests may use.
        on_progress: Is told what is done.
        **options: Fields of the zoo's `Config`, as `mw.hf.load` takes them, such as ``dtype="float32"``.
    """
    with progress(on_progress) as say:
        say("reading the configuration")
        model = load(path, **options)
        keys = read_json(folder_of(path) / "config.json", "model of Hugging Face")
        machines = None if is_local(cluster) else find_cluster(cluster)
        count = len(jax.local_devices()) if machines is None else machines.num_devices
        sizes = sizes or Sizes()
        limits, cache = chosen(model.config, sizes, _longest(keys), count)
        prices = step_prices(model.config, machines or find_cluster("local"), count)
        if slo is not None:
            promised = keeping(slo, prices, limits, sizes)
            limits, cache = chosen(model.config, promised, _longest(keys), count)
        decoder = Decoder.of(model.config, cache)
        layout = ModelPlan(decoder, limits, prices, machines, method)
        placement = layout.placement() if count > 1 else Placement.single(decoder)
        kinds = jax.tree.map(
            lambda kind, sharding: jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding),
            decoder.params(),
            placement.params,
        )
        params = replace(model, config=decoder.config, like=kinds).params
        eos, pad = special_tokens(model.path, keys)
        engine = Engine(model.config, params, limits, cache, placement=placement, eos=eos, on_progress=say)
    return Loaded(engine, layout, pad)


def load_engine(path: str, sizes: dict[str, Any] | None = None, **options: Any) -> Engine:
    """The engine of a folder, for the worker of a server; `sizes` are the fields of `Sizes`."""
    return load_model(path, sizes=Sizes(**(sizes or {})), **options).engine


def special_tokens(folder: Path, keys: dict[str, Any]) -> tuple[tuple[int, ...], int]:
    """The tokens that end a text, and the one that fills rows up, by the configurations of a folder."""
    file = folder / "generation_config.json"
    both = {**keys, **(read_json(file, "model") if file.exists() else {})}
    given = both.get("eos_token_id")
    eos = tuple(given) if isinstance(given, list) else () if given is None else (given,)
    pad = both.get("pad_token_id")
    return eos, pad if pad is not None else (*eos, 0)[0]


def _longest(keys: dict[str, Any]) -> int | None:
    return next((keys[name] for name in ("max_position_embeddings", "n_positions") if keys.get(name)), None)
