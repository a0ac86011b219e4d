"""Makes the work of a plan with stages: each stage's passes at their planned times.

A stage records which part of its seconds are matrix products, and which part of its communication is between its
replicas. On other machines each part is scaled by the rate on which it depends.
"""

from collections.abc import Sequence
from dataclasses import replace

from meshwright.cost.rates import cluster_rates
from meshwright.cost.sustained import sustained_s
from meshwright.errors import SimulationError
from meshwright.hardware import Cluster, Mesh
from meshwright.pipeline.prices.transfer import share_of_adapter, transfer_s
from meshwright.pipeline.search.device_line import neighbours
from meshwright.plans.plan import PlanData
from meshwright.plans.stage import Stage, StageTime
from meshwright.plans.stage_instructions import stage_instructions
from meshwright.simulator.spmd import counted, num_tokens
from meshwright.simulator.work import COLLECTIVE, COMPUTE, GRADIENTS, Chunk, Task, Tasks, Work

_LARGE_FLOPS, _LARGE_BYTES = 1e12, 2.0**27  # products and messages that reach their full rates
_REPLICAS = (0,)  # the axis of a stage's mesh


def staged_work(plan: PlanData, cluster: Cluster) -> Work:
    """The work of one step of a pipelined plan.

    Stages know the seconds of their passes, not the operations in them. On other machines, hosts of the same sizes,
    products are scaled by the chips' rates, other compute by their memory bandwidth, and communication by the time of a
    large all-reduce over the same axes.
    """
    assert plan.pipeline is not None and plan.mesh.cluster is not None
    planned_cluster = plan.mesh.cluster
    stages = plan.stages
    near = neighbours([stage.submesh for stage in stages]).tolist()
    if cluster != planned_cluster:
        stages = tuple(
            _moved(stage, planned_cluster, cluster, close) for stage, close in zip(stages, near, strict=True)
        )
    interleave = plan.pipeline.interleave
    chunks = [_chunk(stage, interleave) for stage in stages]
    if interleave > 1:  # the last stage sends on, too: to the next chunk of the first
        chunks[-1] = replace(chunks[-1], send_s=max(chunk.send_s for chunk in chunks))
    return Work(
        name=f"{plan.method} on {cluster!r}",
        chunks=tuple(chunks * interleave),
        num_stages=len(stages),
        num_microbatches=plan.pipeline.num_microbatches,
        schedule=plan.pipeline.schedule,
        update=tuple(_tasks("update", stage.update) for stage in stages),
        state_bytes=tuple(float(stage.state_bytes) for stage in stages),
        devices=tuple(stage.submesh.num_devices for stage in stages),
        limit_bytes=tuple(float(stage.submesh.machines(cluster).memory_bytes) for stage in stages),
        peak_flops=sum(_peak_flops(stage, cluster) for stage in stages) / plan.mesh.num_devices,
        # Plans of earlier versions do not record the parts of their stages' times.
        model_flops=sum(s.flops * s.mesh.num_devices for s in stages) or plan.flops * plan.mesh.num_devices,
        tokens=num_tokens(plan),
        counted=counted(plan),
        contention=cluster_rates(stages[0].submesh.machines(cluster)).constants.contention,
        plays=stage_instructions(plan),
    )


def _moved(stage: Stage, own: Cluster, other: Cluster, near: bool) -> Stage:
    """A stage with the times it would have on other machines; ``near`` if it sends to one on its host."""
    sizes = [(group.num_hosts, group.devices_per_host) for group in own.groups]
    if sizes != [(group.num_hosts, group.devices_per_host) for group in other.groups]:
        raise SimulationError(
            f"the plan's stages are for {own!r} and cannot be moved to {other!r}, whose hosts are not as many or as "
            "large: plan again for it"
        )
    before, after = stage.submesh.machines(own), stage.submesh.machines(other)
    mesh = after.mesh(stage.mesh.sizes)
    there, here = cluster_rates(after, other.num_devices), cluster_rates(before, own.num_devices)
    products = there.product_s(_LARGE_FLOPS, dtype=stage.dtype) / here.product_s(_LARGE_FLOPS, dtype=stage.dtype)
    moves = there.stream_s(_LARGE_BYTES) / here.stream_s(_LARGE_BYTES)
    size = stage.send_bytes or _LARGE_BYTES
    wires, hosts = (transfer_s(other, size, c) / transfer_s(own, size, c) for c in (near, False))
    if not near:
        devices = stage.submesh.num_devices
        wires *= share_of_adapter(other, devices) / share_of_adapter(own, devices)
    outside, inside = (
        _large_sum_s(mesh, axes) / (_large_sum_s(stage.mesh, axes) or 1.0)
        for axes in (_REPLICAS, range(1, len(mesh.sizes)))
    )

    def scaled(time: StageTime) -> StageTime:
        product_s, replicas_s, stages_s = products * time.product_s, outside * time.replicas_s, hosts * time.stages_s
        compute_s = product_s + moves * time.moving_s
        sent_s = replicas_s + stages_s + inside * time.inside_s
        return StageTime(compute_s, sent_s, product_s, replicas_s, stages_s)

    return replace(
        stage,
        mesh=mesh,
        forward=scaled(stage.forward),
        backward=scaled(stage.backward),
        recompute=scaled(stage.recompute),
        gradients=scaled(stage.gradients),
        update=scaled(stage.update),
        transfer_s=stage.transfer_s * wires,
    )


def _peak_flops(stage: Stage, cluster: Cluster) -> float:
    """Matrix rate of all devices of a stage."""
    return stage.submesh.num_devices * stage.submesh.machines(cluster).chip.peak_flops(stage.dtype)


def _large_sum_s(mesh: Mesh, axes: Sequence[int]) -> float:
    return sustained_s(mesh, "all_reduce", tuple(axes), _LARGE_BYTES)


def _chunk(stage: Stage, interleave: int) -> Chunk:
    """One of a stage's chunks, which are alike."""
    whole, products = stage.backward + stage.recompute, stage.backward.compute_s * stage.weights_fraction
    weights = StageTime(products, 0.0, products)
    inputs = whole + weights.times(-1.0)
    forward, backward, apart, of_weights = (
        time.times(1 / interleave) for time in (stage.forward, whole, inputs, weights)
    )
    gradients = stage.gradients.communication_s / interleave
    passes = _tasks("backward", backward)
    return Chunk(
        forward=_tasks("forward", forward),
        backward=passes,
        closing=_with_gradients(passes, gradients),
        inputs=_tasks("inputs' gradients", apart),
        weights=_tasks("weights' gradients", of_weights),
        closing_weights=_with_gradients(_tasks("weights' gradients", of_weights), gradients),
        send_s=stage.transfer_s,
        send_bytes=stage.send_bytes,
        activation_bytes=stage.activation_bytes / interleave,
        working_bytes=float(stage.transient_bytes),
    )


def _tasks(name: str, time: StageTime) -> Tasks:
    """A pass: its compute and its collectives, which do not overlap."""
    compute = Task(name, COMPUTE, "compute", time.compute_s)
    sent = Task(f"collectives of {name}", COLLECTIVE, "collective", time.communication_s, "mesh", (0,))
    return (compute, sent) if time.communication_s > 0 else (compute,)


def _with_gradients(tasks: Tasks, gradients_s: float) -> Tasks:
    """A pass overlapped with the exchange of gradients: the first gradients are ready when half of the pass is done."""
    if gradients_s <= 0:
        return tasks
    compute, *others = tasks
    halves = [compute._replace(seconds=compute.seconds / 2), compute._replace(seconds=compute.seconds / 2)]
    moved = [task._replace(needs=tuple(n + 1 for n in task.needs)) for task in others]
    return (*halves, *moved, Task("gradients", COLLECTIVE, GRADIENTS, gradients_s, "mesh", (0,)))
