"""Makes the work of a plan with stages: each stage's passes by the times it was planned with, at a step's real pace."""

from dataclasses import replace

from meshwright.errors import SimulationError
from meshwright.hardware import Cluster, Mesh
from meshwright.hardware.clusters import CATALOGUE
from meshwright.pipeline.line import neighbours
from meshwright.planner.plan import Plan
from meshwright.planner.stage import Stage, StageTime
from meshwright.simulator.kernels import Kernels, kernels, measured_kernels
from meshwright.simulator.spmd import num_tokens
from meshwright.simulator.work import COLLECTIVE, COMPUTE, GRADIENTS, Chunk, Task, Tasks, Work

_LARGE_FLOPS, _LARGE_BYTES = 1e12, 2.0**27  # products and messages that reach their full rates


def staged_work(plan: Plan, cluster: Cluster) -> Work:
    """The work of one step of a pipelined plan.

    Stages know the seconds of their passes, not the operations in them. On other machines, hosts of the same sizes,
    compute is scaled by the chips' rates and communication by what a large all-reduce takes.
    """
    assert plan.pipeline is not None and plan.mesh.cluster is not None
    own = plan.mesh.cluster
    stages = plan.stages
    if cluster != own:
        near = neighbours([stage.submesh for stage in stages]).tolist()
        stages = tuple(_moved(stage, own, cluster, close) for stage, close in zip(stages, near, strict=True))
    interleave = plan.pipeline.interleave
    prices = [_prices(stage, cluster) for stage in stages]
    chunks = [_chunk(stage, price, interleave) for stage, price in zip(stages, prices, strict=True)]
    if interleave > 1:  # the last stage sends on, too: to the next chunk of the first
        chunks[-1] = replace(chunks[-1], send_s=max(chunk.send_s for chunk in chunks))
    first = stages[0]
    return Work(
        name=f"{plan.method} on {cluster!r}",
        chunks=tuple(chunks * interleave),
        num_stages=len(stages),
        num_microbatches=plan.pipeline.num_microbatches,
        schedule=plan.pipeline.schedule,
        update=tuple(_tasks("update", stage.update, price) for stage, price in zip(stages, prices, strict=True)),
        state_bytes=tuple(float(stage.state_bytes) for stage in stages),
        devices=tuple(stage.submesh.num_devices for stage in stages),
        limit_bytes=float(min(stage.submesh.machines(cluster).memory_bytes for stage in stages)),
        peak_flops=first.submesh.machines(cluster).chip.peak_flops("bfloat16"),
        model_flops=plan.flops * plan.mesh.num_devices,
        tokens=num_tokens(plan),
        contention=prices[0].constants.contention,
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
    compute = after.chip.matmul_s(_LARGE_FLOPS) / before.chip.matmul_s(_LARGE_FLOPS)
    sent = _large_sum_s(after.mesh(stage.mesh.sizes)) / (_large_sum_s(stage.mesh) or 1.0)
    old, new = (before.intra, after.intra) if near else (before.inter, after.inter)
    wires = old.bandwidth / new.bandwidth

    def scaled(time: StageTime) -> StageTime:
        return StageTime(time.compute_s * compute, time.communication_s * sent)

    return replace(
        stage,
        mesh=after.mesh(stage.mesh.sizes),
        forward=scaled(stage.forward),
        backward=scaled(stage.backward),
        recompute=scaled(stage.recompute),
        gradients=scaled(stage.gradients),
        update=scaled(stage.update),
        transfer_s=stage.transfer_s * wires,
    )


def _large_sum_s(mesh: Mesh) -> float:
    return float(mesh.collective_s("all_reduce", tuple(range(len(mesh.sizes))), _LARGE_BYTES))


def _prices(stage: Stage, cluster: Cluster) -> Kernels:
    machines = stage.submesh.machines(cluster)
    return kernels(machines.chip) if machines.known == CATALOGUE else measured_kernels(machines.chip)


def _chunk(stage: Stage, prices: Kernels, interleave: int) -> Chunk:
    """One of a stage's chunks, which are alike."""
    whole = _add(stage.backward, stage.recompute)
    inputs = StageTime(whole.compute_s - stage.backward.compute_s * stage.weights_fraction, whole.communication_s)
    weights = StageTime(stage.backward.compute_s * stage.weights_fraction, 0.0)
    forward, backward, apart, own = (_part(time, interleave) for time in (stage.forward, whole, inputs, weights))
    gradients = _part(stage.gradients, interleave)
    passes = _tasks("backward", backward, prices)
    return Chunk(
        forward=_tasks("forward", forward, prices),
        backward=passes,
        closing=_with_gradients(passes, gradients),
        inputs=_tasks("inputs' gradients", apart, prices),
        weights=_tasks("weights' gradients", own, prices),
        closing_weights=_with_gradients(_tasks("weights' gradients", own, prices), gradients),
        send_s=stage.transfer_s,
        send_bytes=stage.send_bytes,
        activation_bytes=stage.activation_bytes / interleave,
        working_bytes=float(stage.transient_bytes),
    )


def _tasks(name: str, time: StageTime, prices: Kernels) -> Tasks:
    """A pass: its compute, and its collectives, which stand in the way of one another."""
    compute = Task(name, COMPUTE, "compute", time.compute_s / prices.sustained)
    sent = Task(f"collectives of {name}", COLLECTIVE, "collective", time.communication_s, "mesh", (0,))
    return (compute, sent) if time.communication_s > 0 else (compute,)


def _with_gradients(tasks: Tasks, gradients: StageTime) -> Tasks:
    """A pass with the exchange of gradients beside it: the first of them are there when half of it is done."""
    if gradients.communication_s <= 0:
        return tasks
    compute, *others = tasks
    halves = [compute._replace(seconds=compute.seconds / 2), compute._replace(seconds=compute.seconds / 2)]
    moved = [task._replace(needs=tuple(n + 1 for n in task.needs)) for task in others]
    sync = Task("gradients", COLLECTIVE, GRADIENTS, gradients.communication_s, "mesh", (0,))
    return (*halves, *moved, sync)


def _add(a: StageTime, b: StageTime) -> StageTime:
    return StageTime(a.compute_s + b.compute_s, a.communication_s + b.communication_s)


def _part(time: StageTime, parts: int) -> StageTime:
    return replace(time, compute_s=time.compute_s / parts, communication_s=time.communication_s / parts)
