"""Converts a pipeline that the search found into a plan: devices, times and bytes of every stage."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshwright.cost.sustained import sustained_s
from meshwright.graph import Traced
from meshwright.hardware import Mesh
from meshwright.pipeline.layers.layers import Layers
from meshwright.pipeline.prices.layer_prices import Item
from meshwright.pipeline.prices.stage_options import Option
from meshwright.pipeline.prices.stage_problem import LEAN, TENSOR, Own, Way
from meshwright.pipeline.prices.transfer import crossing_bytes, exchange_s, send_s
from meshwright.pipeline.record import StagedDetails
from meshwright.pipeline.search.device_line import place
from meshwright.pipeline.search.result import FoundPipeline, FoundStage
from meshwright.pipeline.search.search import PipelineSearch
from meshwright.planner.grouping.roles import find_roles
from meshwright.planner.kernel_remarks import kernel_remarks, unsplittable
from meshwright.planner.methods import Method
from meshwright.planner.planner import provenance
from meshwright.plans.plan import Cost, Memory, PlanData, SolutionSummary
from meshwright.plans.stage import Stage, StageTime, Submesh
from meshwright.plans.tensor import KEPT, Spec, Tensor
from meshwright.solver.problem.gap import relative_gap

_SPREAD = (
    "",
    "optimizer",
    "optimizer and gradients",
    "all state",
)  # state sharded over replicas, by ZeRO stage
_INNER = {"x": "y", "y": "z"}  # names of a view's axes behind that of the replicas
_WORDS = {TENSOR: "weights", LEAN: "tensors, least memory"}


def describe(search: PipelineSearch, traced: Traced, method: Method, seconds: float) -> PlanData:
    """The plan of the best pipeline."""
    found = search.best
    assert found is not None
    catalogue, cluster = search.catalogue, search.catalogue.cluster
    submeshes = place(cluster, found.sizes)
    stages = tuple(_stage(search, found, traced, number, submesh) for number, submesh in enumerate(submeshes))
    busiest = max(stages, key=lambda s: s.microbatch_s * found.pipeline.num_microbatches + s.once_s)
    parts = (busiest.forward, busiest.backward, busiest.recompute)
    sent = found.pipeline.num_microbatches * sum(t.communication_s for t in parts)
    sent += busiest.gradients.communication_s + busiest.update.communication_s
    fullest = max(stages, key=lambda s: s.peak_bytes)
    cost = Cost(found.total_s - sent, sent)
    bound = min(search.bound_s, cost.total)  # the two may differ in the last digit
    limit = round(catalogue.needed * catalogue.limits[found.stages[stages.index(fullest)].group])
    state = {t.path: t for s in reversed(stages) for t in s.tensors}
    arguments = tuple(_arguments(traced, state, found.stages[0].option, catalogue.rows.batch))
    results, call = tuple(_results(traced, arguments)), traced.call
    mesh = Mesh((cluster.num_devices,), cluster)
    stages_from = (
        f"{catalogue.layers.num_layers} layers priced by {catalogue.num_solves} solves, "
        f"{search.tried} pipelines compared"
    )
    return PlanData(
        mesh=mesh,
        method=method.name,
        cost=cost,
        flops=float(search.flow.flops.sum()) / cluster.num_devices,
        memory=Memory(
            fullest.peak_bytes,
            limit,
            {
                "state": fullest.state_bytes,  # what is left of the peak are temporaries of one microbatch
                "activations": max(fullest.peak_bytes - fullest.state_bytes - fullest.transient_bytes, 0),
            },
            f"stage {stages.index(fullest)}",
        ),
        solution=SolutionSummary("feasible", bound, relative_gap(cost.total, bound), seconds),
        arguments=arguments,
        results=results,
        details=StagedDetails.of(catalogue, found),
        unsplittable=unsplittable(traced.graph),
        considered=(),
        provenance=provenance(traced, mesh, catalogue.needed) | {"stages": stages_from},
        pipeline=found.pipeline,
        stages=stages,
        microbatches=found.pipeline.num_microbatches,
        origin=traced,
        in_tree=call.arguments.tree,
        out_tree=call.results.tree,
        in_leaves=call.arguments.leaves,
        remarks=tuple(kernel_remarks(traced.graph)),
    )


def _stage(search: PipelineSearch, found: FoundPipeline, traced: Traced, number: int, submesh: Submesh) -> Stage:
    stage, pipeline, layers = found.stages[number], found.pipeline, search.catalogue.layers
    option, cluster = stage.option, search.catalogue.cluster
    by_layer = np.concatenate([option.prices.items[:, a:b] for a, b in stage.chunks], axis=1)
    items = by_layer.sum(axis=1)
    transient = max(option.transient[a:b].max() for a, b in stage.chunks)
    again, again_sent = (float(part.sum()) for part in option.again(by_layer))
    work = (Item.FORWARD, Item.FORWARD_PRODUCTS) if option.checkpoint == "full" else (Item.AGAIN, Item.AGAIN_PRODUCTS)
    again_products = again * float(items[work[1]] / items[work[0]]) if again else 0.0
    state, shared_s = float(option.state_bytes(items)), 0.0
    for owner, other, value in search.catalogue.tied:
        owns, copies = (any(a <= layer < b for a, b in stage.chunks) for layer in (owner, other))
        if owns != copies:
            shared_s += exchange_s(cluster, option.prices.local_bytes[value])
            state += option.tied_bytes(option.prices.local_bytes[value]) * copies
    size = float(items[Item.GRADIENT_BYTES])
    between = sum(sustained_s(option.mesh, kind, (0,), size) for kind in option.collectives)
    fetched, returned = (float(part.sum()) for part in option.exchanged(by_layer))
    rows = search.catalogue.rows.batch / pipeline.num_microbatches
    share = rows / search.catalogue.rows.batch / option.mesh.num_devices
    ends, near = [b for _, b in stage.chunks], stage.near or cluster.num_hosts == 1
    crossing = crossing_bytes(layers, option.prices, share)
    held, data = float(option.held(items)), pipeline.num_microbatches * float(items[Item.DATA_BYTES])
    times = {
        "forward": StageTime(
            float(items[Item.FORWARD]),
            float(items[Item.FORWARD_SENT]) + fetched,
            float(items[Item.FORWARD_PRODUCTS]),
            fetched,
        ),
        "backward": StageTime(
            float(items[Item.BACKWARD]),
            float(items[Item.BACKWARD_SENT]) + returned,
            float(items[Item.BACKWARD_PRODUCTS]),
            returned,
        ),
        "recompute": StageTime(again, again_sent, again_products),
        "gradients": StageTime(0.0, float(items[Item.GRADIENTS_SENT]) + between + shared_s, 0.0, between, shared_s),
        "update": StageTime(float(option.update_s(items)), float(items[Item.UPDATE_SENT])),
    }
    return Stage(
        layers=stage.chunks[0],
        submesh=submesh,
        mesh=option.mesh,
        method=_words(option),
        **times,
        weights_fraction=float(items[Item.WEIGHTS] / items[Item.BACKWARD]) if items[Item.BACKWARD] else 0.0,
        send_bytes=float(crossing[0 if near else 1][ends].mean()),
        transfer_s=float(send_s(cluster, *crossing, near, option.mesh.num_devices)[ends].mean()),
        state_bytes=int(state),
        activation_bytes=int(held),
        transient_bytes=int(transient),
        peak_bytes=int(
            search.catalogue.needed * (state + data + transient + held * stage.in_flight / pipeline.interleave)
        ),
        chunks=stage.chunks,
        tensors=_tensors(search, traced, stage),
        flops=sum(float(search.flops[a:b].sum()) for a, b in stage.chunks) / option.mesh.num_devices,
        dtype=search.flow.dtype,
    )


def _words(option: Option) -> str:
    """How a stage is split, in words."""
    words = ["x: batch"] if option.data > 1 else []
    words += [f"x: {_SPREAD[option.zero]}"] if option.zero else []
    words += [f"{', '.join(option.mesh.names[1:])}: {_split(option.way)}"] if option.inner > 1 else []
    return ", ".join(words) or "one device"


def _split(way: Way) -> str:
    """What the axes of a view split, in words."""
    if isinstance(way, Own):
        return "tensors" if way.memory is None else "tensors, less memory"
    return _WORDS.get(way, "tensors")


def _tensors(search: PipelineSearch, traced: Traced, stage: FoundStage) -> tuple[Tensor, ...]:
    """State that a stage holds, with its sharding; stacked parameters in part."""
    graph, layers, option = traced.graph, search.catalogue.layers, stage.option
    roles, found = find_roles(graph), []
    optimizer = set(roles.optimizer)
    for path, value in zip(graph.input_paths, graph.inputs, strict=True):
        spec = option.prices.specs.get(value)
        mine = sum(_overlap(layers, unit, stage) for unit in layers.places.arguments[value])
        if spec is None or not mine:
            continue
        kind, shape = graph.types[value], graph.types[value].shape
        whole = max(int(layers.count[unit]) for unit in layers.places.arguments[value])
        if whole > 1 and shape and shape[0] == whole:
            shape = (mine, *shape[1:])
        spec = tuple(tuple(_INNER[axis] for axis in axes) for axes in spec)
        if option.zero >= (1 if value in optimizer else 3):
            spec = _spread(spec, shape, option)
        role = "optimizer" if value in optimizer else "parameters"
        found.append(Tensor(path, shape, kind.dtype, spec, role, value in graph.donated))
    return tuple(found)


def _overlap(layers: Layers, unit: int, stage: FoundStage) -> int:
    """How many of a unit's layers a stage has."""
    first, count = int(layers.first[unit]), int(layers.count[unit])
    return sum(max(0, min(b, first + count) - max(a, first)) for a, b in stage.chunks)


def _spread(spec: Spec, shape: tuple[int, ...], option: Option) -> Spec:
    """A sharding with the replicas' axis added to the first dim that it divides.

    It is the innermost axis of the dim, so that a replica's part is a part of what each of its devices has already.
    """
    for dim, (axes, size) in enumerate(zip(spec, shape, strict=True)):
        if size % math.prod(option.mesh.shape[axis] for axis in ("x", *axes)) == 0:
            return (*spec[:dim], (*axes, "x"), *spec[dim + 1 :])
    return spec


def _arguments(traced: Traced, state: dict[str, Tensor], option: Option, rows: int) -> Iterator[Tensor]:
    """All arguments; those that are no stage's state are data, split as on the first stage that reads them."""
    graph = traced.graph
    axes, parts = ["x"] if option.data > 1 else [], option.prices.batch_parts
    for name, size in list(option.mesh.shape.items())[1:]:
        if size > 1 and parts % size == 0:
            axes, parts = [*axes, name], parts // size
    for position in traced.call.arguments.positions:
        if position is None:
            yield KEPT
            continue
        path, kind = graph.input_paths[position], graph.types[graph.inputs[position]]
        split = tuple(axes) if kind.shape and kind.shape[0] == rows else ()
        spec = (split, *((),) * (len(kind.shape) - 1)) if kind.shape else ()
        # A stage has some of the layers of an array that is stacked over them; the argument has them all.
        yield replace(state.get(path, Tensor(path, kind.shape, kind.dtype, spec, "data")), shape=kind.shape)


def _results(traced: Traced, arguments: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """All results; the next values of arguments are placed like the arguments."""
    graph, by_path = traced.graph, {t.path: t for t in arguments}
    for position in traced.call.results.positions:
        if position is None:
            yield KEPT
            continue
        path, kind = graph.output_paths[position], graph.types[graph.outputs[position]]
        if position in graph.state:
            argument = by_path[graph.input_paths[graph.state[position]]]
            yield Tensor(path, argument.shape, kind.dtype, argument.spec, "state")
        else:
            yield Tensor(path, kind.shape, kind.dtype, ((),) * len(kind.shape), "result")
