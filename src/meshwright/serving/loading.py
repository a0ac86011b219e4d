"""From a folder of Hugging Face to an engine that runs; what the server's worker and `mw.get_model` share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.errors import DoesNotFit, ServingError
from meshwright.facade import Plan
from meshwright.hardware import Cluster
from meshwright.hardware.load import is_local
from meshwright.hf.files import folder_of, read_json
from meshwright.hf.model import Model, load
from meshwright.parallelism.sentence import plain_sentence
from meshwright.planner.methods import Auto, Method
from meshwright.planning import plan
from meshwright.profiler import cluster as find_cluster
from meshwright.progress import Say, progress
from meshwright.runtime.placement import argument_shardings
from meshwright.serving.arrangement import ReplicaGroup, arranged, shared_out, transfer_lengths
from meshwright.serving.engine import Engine, Fleet, Placement
from meshwright.serving.engine.placement import dealt
from meshwright.serving.engine.stages import even_bounds
from meshwright.serving.layout import laid_out
from meshwright.serving.models import Decoder, StepShape, join_products
from meshwright.serving.planning.plan_serving import plan_serving
from meshwright.serving.planning.prices import StepPrices
from meshwright.serving.planning.promise import Slo
from meshwright.serving.planning.split import Degrees
from meshwright.serving.planning.traffic import Traffic
from meshwright.serving.promised import keeping, step_prices
from meshwright.serving.scheduling import Limits
from meshwright.serving.sizes import Sizes, chosen, of_stage
from meshwright.units import format_bytes, format_seconds
from meshwright.zoo.layers import PyTree


@dataclass(frozen=True)
class ModelPlan:
    """How a model is served: where its parameters and its cache are, and what the two kinds of step cost.

    Both kinds use one layout, since they share the parameters and the cache: it is planned for the step of running
    sequences, of which there are many for each prompt. Prompts that are computed apart have a layout of their own.

    Attributes:
        decoder: The model with its cache.
        limits: What the requests of one replica share.
        prices: What steps cost by the cost model of serving.
        cluster: What it is planned for; None for the devices at hand.
        method: How each stage is split: by a method of `mw.plan`, or as a plan of serving chose.
        replicas: How many there are.
        stages: Into how many stages of layers each is cut.
        devices: How many each stage has.
        prompts: Where prompts are computed, if apart.
    """

    decoder: Decoder
    limits: Limits
    prices: StepPrices
    cluster: Cluster | None
    method: Method | Degrees | str | None
    replicas: int = 1
    stages: int = 1
    devices: int = 1
    prompts: "ModelPlan | None" = None

    @cached_property
    def decode(self) -> Plan:
        """The plan of a step in which all slots generate; of several stages, for the one with the most layers."""
        method = self.method
        if isinstance(method, Degrees):
            method = laid_out(method, self._of_stage)
        return self._plan(StepShape(self.limits.slots, 0, 0, False, self._width), method)

    @cached_property
    def prefill(self) -> Plan:
        """The plan of a step that computes one chunk of a prompt, with parameters and cache where `decode` has them."""
        if self.prompts is not None:
            return self.prompts.prefill
        same: Method | None = None
        if self.devices > 1:
            kept = [tensor for tensor in self.decode.arguments if tensor.path not in ("last", "packed")]
            fix = {tensor.path: PartitionSpec(*tensor.spec) for tensor in kept}
            same = Auto(fix=fix, mesh_shapes=(tuple(self.decode.mesh.shape.values()),))
        return self._plan(StepShape(0, 1, self.limits.chunk, False, self._width), same)

    @property
    def _width(self) -> int:
        return self.decoder.cache.width(self.limits.max_len)

    def _plan(self, shape: StepShape, method: Method | str | None) -> Plan:
        whole = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (self.limits.slots, shape.size)]
        decoder = self._of_stage
        step = partial(decoder.step, shape)

        @partial(jax.jit, donate_argnums=1)
        def decode_step(params: PyTree, cache: PyTree, last: PyTree, packed: PyTree) -> PyTree:
            return step(params, cache, last, packed)

        arguments = (decoder.params(), decoder.arrays(), *whole)
        return plan(decode_step, *arguments, cluster=self.cluster, method=method)

    @property
    def _of_stage(self) -> Decoder:
        """The layers of the largest stage, between the embedding and the head."""
        return Decoder.of(of_stage(self.decoder.config, self.stages), self.decoder.cache)

    def placement(self, devices: Sequence[jax.Device]) -> Placement:
        """Where the plan of running sequences puts parameters and cache, on some devices."""
        if len(devices) == 1:
            return Placement.single(self.decoder, devices[0])
        found = self.decode
        if found.stages:
            raise ServingError("the plan has stages, and the engine runs steps whole; give a method without a pipeline")
        shardings = argument_shardings(found)
        decoder = self._of_stage
        leaves, tree = jax.tree.flatten((decoder.params(), decoder.arrays()))
        params, arrays = jax.tree.unflatten(tree, shardings[: len(leaves)])
        every = range(self.decoder.config.layers)  # each layer as one of the layers that were planned
        arrays = [arrays[layer % len(arrays)] for layer in every]
        params["layers"] = [params["layers"][layer % len(params["layers"])] for layer in every]
        mesh = shardings[0].mesh
        return Placement(params, arrays, NamedSharding(mesh, PartitionSpec())).on(devices)

    def __str__(self) -> str:
        config, limits, prices, context = self.decoder.config, self.limits, self.prices, self.limits.max_len // 2
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.decoder.params()))
        cache = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.decoder.arrays()))
        return "\n".join(
            [
                *self._arranged(),
                f"{format_bytes(size)} of parameters in {config.dtype}, used in the dtype they are stored in",
                f"{format_bytes(cache)} of cache in {self.decoder.cache.dtype}: {self.decoder.cache.described}",
                f"at most {limits.slots} sequences of {limits.max_len} tokens at once, {limits.chunk} tokens of "
                f"prompts in a step beside them, {limits.queue} requests in the queue",
                *self._split(),
                f"predicted at a context of {context}: {format_seconds(prices.decode_s(1, context))} a token with one "
                f"sequence, {format_seconds(prices.decode_s(limits.slots, context))} with {limits.slots}; "
                f"{format_seconds(prices.prefill_s(limits.chunk))} for {limits.chunk} tokens of a prompt",
            ]
        )

    def _split(self) -> list[str]:
        """How steps are split; on one device there is nothing to plan."""
        prompts = self.prompts or self
        if self.devices == prompts.devices == 1:
            return ["each step on one device: nothing is split"]
        return [f"running sequences: {plain_sentence(self.decode)}", f"prompts: {plain_sentence(self.prefill)}"]

    def _arranged(self) -> list[str]:
        """What there is to say of several engines."""
        said = []
        for part, purpose in ((self.prompts, " for prompts"), (self, " for answers" if self.prompts else "")):
            if part is not None and (part.replicas > 1 or part.stages > 1 or purpose):
                stages = f", each in {part.stages} stages of layers" if part.stages > 1 else ""
                said.append(f"{part.replicas} replica{'s' * (part.replicas > 1)}{purpose}{stages}")
        return said


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to serve."""

    engine: Engine | Fleet
    plan: ModelPlan
    pad: int


def load_model(
    path: str | PathLike[str],
    *,
    cluster: Cluster | str = "local",
    method: Method | str | None = None,
    slo: Slo | None = None,
    sizes: Sizes | None = None,
    arrangement: Sequence[ReplicaGroup] = (),
    traffic: Traffic | None = None,
    on_progress: Say | None = None,
    **options: Any,
) -> Loaded:
    """Loads a model, plans it where there are several devices, and compiles its steps.

    Args:
        path: The folder of the model.
        cluster: What `mw.plan` takes; the local devices by default.
        method: How it is split over the devices of a stage, such as ``"tensor"``; `mw.Auto()` by default.
        slo: What steps are to keep to; by default nothing is promised.
        sizes: What requests may use.
        arrangement: The replicas; by default one on all devices.
        traffic: A load for which they are planned, in place of `arrangement`.
        on_progress: Is told what is done.
        **options: Fields of the zoo's `Config`, as `mw.hf.load` takes them, such as ``dtype="float32"``.
    """
    with progress(on_progress) as say:
        say("reading the configuration")
        asked = sizes or Sizes()
        model = load(path, **options)
        keys = read_json(folder_of(path) / "config.json", "model of Hugging Face")
        devices = jax.local_devices()
        machines = find_cluster("local") if is_local(cluster) else find_cluster(cluster)
        if traffic is not None:
            say("planning for the load")
            dtypes = {"weights": model.config.dtype, "cache": asked.cache_dtype or model.config.dtype}
            arrangement = arranged(None, None, None, plan_serving(model.config, machines, traffic, slo, **dtypes))
        groups = shared_out(arrangement, len(devices) if is_local(cluster) else machines.num_devices)
        eos, pad = special_tokens(model.path, keys)
        promise = None if traffic is not None else slo  # what is planned for a load keeps it already
        plans: list[ModelPlan] = []
        engines: list[list[Engine]] = []
        begun = 0
        for group in groups:
            layout = _fitting(model.config, group, machines, is_local(cluster), method, promise, asked, _longest(keys))
            own = devices[begun : begun + group.num_devices]
            if len(own) < group.num_devices:
                layout.placement(devices * group.num_devices)  # says what is missing
            engines.append(_engines(model, layout, own, eos, say))
            plans.append(layout)
            begun += group.num_devices
        if len(groups) == 1:
            (several,) = engines
            return Loaded(several[0] if len(several) == 1 else Fleet(several), plans[0], pad)
        fronts, backs = engines
        lengths = transfer_lengths(min(plan.limits.max_len for plan in plans))
        for engine in (*fronts, *backs):
            engine.compile_transfers(lengths, say)
    return Loaded(Fleet(fronts, backs), replace(plans[1], prompts=plans[0]), pad)


def _fitting(
    config: Any,
    group: ReplicaGroup,
    machines: Cluster,
    local: bool,
    method: Method | str | None,
    slo: Slo | None,
    sizes: Sizes,
    longest: int | None,
) -> ModelPlan:
    """How replicas are laid out: in as many stages as are asked for, or in as few as they fit in.

    Stages come last, since a request passes through them one after the other, while devices that split a layer work at
    the same time.
    """
    asked = sizes.over(group.sizes)
    refused: DoesNotFit | None = None
    for staged in group.staged():
        if staged.stages > config.layers:
            break
        whole = staged.devices == machines.num_devices
        part = None if local and whole else machines if whole else machines.part(1, staged.devices)
        groups = group.split.data if group.split else 1
        size = (longest, staged.devices, staged.stages, machines.memory_bytes, groups)
        try:
            limits, cache = chosen(config, asked, *size)
            prices = step_prices(config, machines, staged.devices, staged.stages, asked.cache_dtype, group.split)
            if slo is not None:
                limits, cache = chosen(config, keeping(slo, prices, limits, asked), *size)
            layout = ModelPlan(
                Decoder.of(config, cache),
                limits,
                prices,
                part,
                group.split or method,
                staged.count,
                staged.stages,
                staged.devices,
            )
            if staged.devices > 1:
                layout.decode, layout.prefill  # noqa: B018, which plans, and says whether they fit
            return layout
        except DoesNotFit as error:
            refused = error if refused is None or error.needed_bytes < refused.needed_bytes else refused
    if refused is None:
        raise ServingError(f"{config.layers} layers cannot be cut into {group.stages} stages; give at most that")
    raise DoesNotFit(
        f"the model and its cache do not fit, whole or in stages of layers: a device needs "
        f"{format_bytes(refused.needed_bytes)} at the least and has {format_bytes(refused.limit_bytes)}; use more "
        "devices, fewer slots, a smaller max_len, or cache_dtype='int8'",
        needed_bytes=refused.needed_bytes,
        limit_bytes=refused.limit_bytes,
    )


def _engines(
    model: Model, layout: ModelPlan, devices: Sequence[jax.Device], eos: Sequence[int], say: Say
) -> list[Engine]:
    """The engines of equal replicas, each on its share of some devices."""
    engines: list[Engine] = []
    share = len(devices) // layout.replicas
    size = share // layout.stages
    for first in range(0, len(devices), share):
        own = devices[first : first + share]
        places = [layout.placement(own[at : at + size]) for at in range(0, share, size)]
        shardings = dealt(places, even_bounds(model.config.layers, layout.stages))
        like = jax.tree.map(
            lambda kind, sharding: jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding),
            layout.decoder.params(),
            shardings,
        )
        params = replace(model, config=layout.decoder.config, like=like).params
        if layout.devices == layout.stages == 1:
            params = join_products(params)
        cache = layout.decoder.cache
        engine = Engine(model.config, params, layout.limits, cache, placements=places, eos=eos, on_progress=say)
        # Each stage works while the others do: for that there must be as many steps on their way as stages.
        engines += [engine, *(engine.twin() for _ in range(layout.stages - 1))]
    return engines


def load_engine(
    path: str,
    sizes: dict[str, Any] | None = None,
    replicas: int | None = None,
    stages: int | None = None,
    apart: Sequence[int] | None = None,
    traffic: Traffic | None = None,
    **options: Any,
) -> Engine | Fleet:
    """The engine of a folder, for the worker of a server; `sizes` are the fields of `Sizes`."""
    groups = arranged(replicas, stages, apart, None, traffic)
    return load_model(path, sizes=Sizes(**(sizes or {})), arrangement=groups, traffic=traffic, **options).engine


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
