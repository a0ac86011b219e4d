"""The verdict in one plain sentence: which kinds of parallelism, over how many devices, inside hosts or across them."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from meshwright.parallelism.words import recomputed_words
from meshwright.plans.records.judgement import Verdict, VerdictPart

if TYPE_CHECKING:
    from meshwright.hardware import Cluster, Mesh
    from meshwright.plans.plan import PlanData

_MOST = (
    0.5  # of the work (for zero: of the bytes) a part must hold for to be in the sentence; the details have the rest
)
_PLAIN = {
    "tensor": "tensor parallel",
    "sequence": "sequence parallel",
    "spatial": "spatially parallel",
    "expert": "expert parallel",
}


def plain_sentence(plan: "PlanData") -> str:
    """A plan in words: ``FSDP across 50 hosts, tensor parallel inside each host``."""
    if not plan.stages:
        parts = f", {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
        again = f", {recomputed_words(plan.recompute)}" if recomputed_words(plan.recompute) else ""
        return _capital(_sentence(plan.verdict, plan.mesh) or str(plan.verdict)) + parts + again
    head = f"Pipeline of {len(plan.stages)} stages over {_devices(plan.mesh.num_devices, plan.mesh.cluster)}"
    meshes = [stage.mesh for stage in plan.stages]
    said = {_sentence(verdict, mesh) for verdict, mesh in zip(plan.stage_verdicts, meshes, strict=True)}
    if len(said) > 1:
        return f"{head}, split in {len(said)} different ways"
    inside = said.pop() if said else ""
    return f"{head}, each {inside}" if inside else head


def _sentence(verdict: Verdict, mesh: "Mesh") -> str:
    """One program in one sentence; empty where no plain word fits."""
    parts = [part for part in verdict.parts if part.share >= _MOST]
    return ", ".join(_clauses(parts, mesh))


def _clauses(parts: Sequence[VerdictPart], mesh: "Mesh") -> Iterator[str]:
    zero = [part for part in parts if part.name == "zero"]
    data = [part for part in parts if part.name == "data"]
    full = tuple(axis for part in zero if "ZeRO-3" in part.text for axis in part.axes)
    axes = tuple(axis for part in data for axis in part.axes)
    if full and set(full) >= set(axes):
        yield f"FSDP {_where(full, mesh, 'data')}"
        zero = []
    else:
        for own in [axes] if any(set(part.axes) >= set(axes) for part in zero) else [part.axes for part in data]:
            spread = [part for part in zero if set(part.axes) & set(own)]
            zero = [part for part in zero if part not in spread]
            if full and set(full) >= set(own):
                yield f"FSDP {_where(own, mesh, 'data')}"
            elif own:
                yield f"data parallel {_where(own, mesh, 'data')}{_spread(spread)}"
    for part in zero:
        yield f"{_state(part)} sharded {_where(part.axes, mesh, part.name)}"
    for part in parts:
        if part.name in _PLAIN:
            yield f"{_PLAIN[part.name]} {_where(part.axes, mesh, part.name)}"
        elif part.name == "context":
            yield f"{part.text.partition(' ×')[0]} {_where(part.axes, mesh, part.name)}"
        elif part.name == "idle":
            count = _devices(prod(mesh.shape[axis] for axis in part.axes), mesh.cluster)
            others = any(p.name in (*_PLAIN, "data", "zero") for p in parts)
            yield f"with groups of {count} that repeat the same work" if others else f"all {count} repeat the same work"
        elif part.name == "none":
            yield part.text


def _spread(zero: Sequence[VerdictPart]) -> str:
    return f" with sharded {' and '.join(_state(part) for part in zero)}" if zero else ""


def _state(part: VerdictPart) -> str:
    for words in ("parameters, gradients and optimizer state", "gradients and optimizer state", "optimizer state"):
        if part.text.startswith(words):
            return words
    return "parameters"


def _where(axes: Sequence[str], mesh: "Mesh", name: str) -> str:
    """How many devices some axes join, and whether these share a host."""
    cluster, count = mesh.cluster, prod(mesh.shape[axis] for axis in axes)
    if count == mesh.num_devices:
        return f"over {_devices(count, cluster)}"
    if cluster is not None and not cluster.mixed and cluster.num_hosts > 1:
        reach = prod(
            mesh.sizes[min(mesh.names.index(axis) for axis in axes) :]
        )  # neighbours from the outermost axis on
        if reach <= cluster.devices_per_host:
            return "inside each host" if count == cluster.devices_per_host else f"over {count} devices inside each host"
        if (
            count == cluster.num_hosts
            and mesh.num_devices // count == cluster.devices_per_host
            and reach == (mesh.num_devices)
        ):
            return f"across {count} hosts"
    if name == "data":
        return f"over {count} groups of {_devices(mesh.num_devices // count, cluster)}"
    return f"over groups of {_devices(count, cluster)}"


def _devices(count: int, cluster: "Cluster | None") -> str:
    return f"{count} {_word(cluster)}{'s' if count != 1 else ''}"


def _word(cluster: "Cluster | None") -> str:
    if cluster is None:
        return "device"
    chips = [group.chip for group in cluster.mixed or (cluster,)]
    if any("cpu" in chip.device_kinds for chip in chips):
        return "CPU device"
    return "TPU" if all(chip.vendor == "Google" for chip in chips) else "GPU"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if text[1:2].islower() else text
