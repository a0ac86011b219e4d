"""The judgement of tensors from their shardings alone: in Alpa's dumps and in plan files of old versions.

Without the program, an axis that splits the data's first dim is taken to be one of data parallelism, and every other
axis that splits parameters to be one of tensor parallelism: by columns where it splits another dim of a weight than the
first, by rows where it splits the first; of three dims or more only if some weight has columns of that size, for else
the first dim counts experts. Columns and rows of the same sizes are taken to be Megatron's pairs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

from meshwright.plans.records.judgement import Judgement, Verdict, VerdictPart
from meshwright.plans.tensor import Tensor

if TYPE_CHECKING:
    from meshwright.plans.plan import PlanData

_SOME, _MOST = 0.05, 0.5  # shares of the bytes from which a split is named, and named without a percentage
_PAIRED = 0.8  # share of the split elements in paired columns and rows from which a split is Megatron's


def judge_at_rest(plan: "PlanData") -> Judgement:
    """The judgement of a plan without a record."""
    tensors = [t for t in (*plan.arguments, *plan.results) if t.role != "static"]
    if plan.pipeline is not None:
        stages = tuple(verdict_at_rest(stage.tensors, stage.mesh.shape, ("x",)) for stage in plan.stages)
        return Judgement(pipeline_verdict(plan, stages), *_kinds(tensors, ("x",)), stages)
    return judge_tensors(tensors, plan.mesh.shape)


def judge_tensors(tensors: Sequence[Tensor], mesh: Mapping[str, int]) -> Judgement:
    """The judgement of some arguments and results on a mesh."""
    axes = data_axes(tensors)
    return Judgement(verdict_at_rest(tensors, mesh, axes), *_kinds(tensors, axes))


def data_axes(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """Axes that split the first dim of some data."""
    axes = [axis for t in tensors if t.role == "data" and t.spec for axis in t.spec[0]]
    return tuple(dict.fromkeys(axes))


def pipeline_verdict(plan: "PlanData", stages: Sequence[Verdict]) -> Verdict:
    """The verdict of a plan in stages: its pipeline, then the verdict of all stages or of each."""
    assert plan.pipeline is not None
    count = plan.pipeline.num_microbatches
    text = f"pipeline of {len(stages)} stages ({plan.pipeline.schedule}, {count} microbatches)"
    if len(stages) == 1:
        text = f"one stage, {count} microbatches" if count > 1 else "one stage"
    return Verdict((VerdictPart("pipeline", (), len(stages), 1.0, text), *_inner(stages)))


def _inner(stages: Sequence[Verdict]) -> Iterator[VerdictPart]:
    """The verdict of all stages or, where they differ, of each run of equal neighbours."""
    if len({str(verdict) for verdict in stages}) == 1:
        yield from stages[0].parts
        return
    for words, group in groupby(enumerate(stages), key=lambda pair: str(pair[1])):
        numbers = [number for number, _ in group]
        which = f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {numbers[0]}–{numbers[-1]}"
        yield VerdictPart("stage", (), 1, 1.0, f"{which}: {words}")


def verdict_at_rest(tensors: Sequence[Tensor], mesh: Mapping[str, int], data: Sequence[str]) -> Verdict:
    """The verdict of tensors, given the axes that split the batch."""
    used = [axis for axis, size in mesh.items() if size > 1]
    if not used:
        return Verdict((VerdictPart("none", (), 1, 1.0, "one device: nothing is split"),))
    shares = {role: _held(tensors, role) for role in ("parameters", "optimizer")}
    parts: list[VerdictPart] = []
    batch = [axis for axis in used if axis in data]
    if batch:
        size = prod(mesh[a] for a in batch)
        parts.append(VerdictPart("data", tuple(batch), size, 1.0, f"data parallel ×{size} over {' and '.join(batch)}"))
    for axis in used:
        share = shares["parameters"][axis]
        if axis not in data and share >= _SOME:
            rest = "" if share >= _MOST else f" of {100 * share:.0f}% of the parameters"
            words = _tensor_words(tensors, axis)
            name = "expert" if words == "experts" else "tensor"
            parts.append(VerdictPart(name, (axis,), mesh[axis], share, f"{words} ×{mesh[axis]} over {axis}{rest}"))
    parts += [part for axis in batch if (part := _zero(axis, mesh[axis], shares)) is not None]
    said = {axis for part in parts for axis in part.axes}
    parts += [VerdictPart("idle", (a,), mesh[a], 1.0, f"{a} splits nothing at rest") for a in used if a not in said]
    return Verdict(tuple(parts))


def _zero(axis: str, size: int, held: Mapping[str, Counter[str]]) -> VerdictPart | None:
    parameters, state = held["parameters"][axis], held["optimizer"][axis]
    if parameters >= _MOST:
        words = f"parameters and optimizer state sharded over {axis} (ZeRO-3, FSDP)"
        return VerdictPart("zero", (axis,), size, parameters, words)
    if parameters >= _SOME:
        return VerdictPart(
            "zero", (axis,), size, parameters, f"{100 * parameters:.0f}% of the parameters sharded over {axis}"
        )
    if state >= _MOST:
        return VerdictPart("zero", (axis,), size, state, f"optimizer state sharded over {axis} (ZeRO-1 or 2)")
    return None


def _held(tensors: Sequence[Tensor], role: str) -> Counter[str]:
    """For each axis the share of a role's elements that it splits."""
    total, sizes = 0, Counter[str]()
    for tensor in tensors:
        if tensor.role == role and tensor.shape:
            size = prod(tensor.shape)
            total += size
            sizes.update({axis: size for axes in tensor.spec for axis in axes})
    return Counter({axis: size / total for axis, size in sizes.items()}) if total else sizes  # type: ignore[misc]


def _tensor_words(tensors: Sequence[Tensor], axis: str) -> str:
    """The use of an axis that splits parameters, and not the batch, in words."""
    sizes = _columns(tensors)
    work: Counter[str] = Counter()
    paired = 0
    rows = {t.shape[0] for t, dim in _split(tensors, axis) if _part(t, dim, axis, (), sizes) == "tensor (row)"}
    for tensor, dim in _split(tensors, axis):
        part, size = _part(tensor, dim, axis, (), sizes), prod(tensor.shape)
        work[part] += size
        paired += size * (tensor.shape[dim] in sizes[axis] and tensor.shape[dim] in rows)
    if work["expert"] > work.total() / 2:
        return "experts"
    tensor_work = work["tensor (column)"] + work["tensor (row)"]
    if tensor_work and paired >= _PAIRED * tensor_work:
        return "Megatron tensor parallel (model parallel)"
    how = " and ".join(word for word in ("column", "row") if work[f"tensor ({word})"])
    return f"tensor parallel (model parallel, by {how})" if how else "tensor parallel (model parallel)"


def _split(tensors: Sequence[Tensor], axis: str) -> list[tuple[Tensor, int]]:
    """Weights that an axis splits, with the dim."""
    weights = [t for t in tensors if t.role == "parameters" and len(t.shape) > 1]
    return [(t, dim) for t in weights for dim, axes in enumerate(t.spec) if axis in axes]


def _columns(tensors: Sequence[Tensor]) -> dict[str, set[int]]:
    """For each axis the sizes of the dims that it splits, other than first ones of weights."""
    sizes_of: dict[str, set[int]] = defaultdict(set)
    for tensor in tensors:
        if tensor.role == "parameters":
            for size, axes in zip(tensor.shape[1:], tensor.spec[1:], strict=True):
                for axis in axes:
                    sizes_of[axis].add(size)
    return sizes_of


def _kinds(tensors: Sequence[Tensor], data: Sequence[str]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    sizes = _columns(tensors)
    kinds = {t.path: _kind(t, data, sizes) for t in tensors}
    return kinds, {t.path: ("",) * len(t.shape) for t in tensors}


def _kind(tensor: Tensor, data: Sequence[str], sizes: Mapping[str, set[int]]) -> str:
    split = [(d, axis) for d, axes in enumerate(tensor.spec) for axis in axes]
    if tensor.role not in ("parameters", "optimizer", "state"):
        words = [f"{'data (split over' if dim == 0 else 'split (over'} {axis})" for dim, axis in split]
        return ", ".join(words) or "replicated"
    if not split:
        return "replicated (data parallel)" if data else "replicated"
    return " + ".join(dict.fromkeys(_part(tensor, dim, axis, data, sizes) for dim, axis in split))


def _part(tensor: Tensor, dim: int, axis: str, data: Sequence[str], sizes: Mapping[str, set[int]]) -> str:
    """The use of an axis that splits one dim of a parameter or of its optimizer state."""
    if axis in data:
        return "zero (sharded over data)"
    if len(tensor.shape) == 1:
        return "tensor"
    if dim > 0:
        return "tensor (column)"
    return "tensor (row)" if len(tensor.shape) == 2 or tensor.shape[0] in sizes.get(axis, ()) else "expert"
