"""Islands: functions that the user wrote for each device, by `jax.shard_map`.

Each manual axis of the mesh is a loop with as many iterations as the axis has devices. A dim that the specs split is
made of the loops of its axes and of an unsplittable one, the part that a device has. So an island has one strategy:
each manual axis splits its own loop, and operands and results have exactly the user's specs.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from meshwright.rules.base import Dims, LoopNest, Rule, Sent, Signature, TensorType
from meshwright.rules.builder import Loops
from meshwright.rules.registry import has_rule, loop_nest
from meshwright.rules.written import spec_dims

ISLAND = "shard_map"

_KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "psum2": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "unreduced_reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "permute",
}


def manual_axes(op: Signature) -> dict[str, int]:
    """Sizes of the axes along which an island is written for one device."""
    sizes, named = dict(op.params["mesh"].shape), op.params.get("newly_manual_axes", op.params.get("manual_axes"))
    return {axis: size for axis, size in sizes.items() if named is None or axis in named}


def shard_map(op: Signature) -> LoopNest:
    """One loop for each manual axis; what a device has of each dim stays whole."""
    loops, axes = Loops(), manual_axes(op)
    of_axis = {axis: loops.add(size)[0] for axis, size in axes.items()}

    def dims(tensors: tuple[TensorType, ...], specs: Any) -> Iterator[Dims]:
        for tensor, spec in zip(tensors, specs, strict=True):
            dims_of_tensor = []
            for size, names in zip(tensor.shape, spec_dims(spec, len(tensor.shape)), strict=True):
                inner = loops.add(size // prod(axes[name] for name in names or ()), "unsplittable")
                dims_of_tensor.append((*(of_axis[name] for name in names or ()), *inner))
            yield tuple(dims_of_tensor)

    operands, results = list(dims(op.operands, op.params["in_specs"])), list(dims(op.results, op.params["out_specs"]))
    work = list(_work(op.params["jaxpr"], 1.0))
    flops = prod(axes.values()) * sum(trips * count for _, count, trips in work)
    sent = tuple(collective for eqn, _, trips in work if (collective := _sent(eqn, trips, axes)))
    return loops.nest(operands, results, flops, leads=True, sent=sent)


def _work(jaxpr: Any, trips: float) -> Iterator[tuple[Any, float, float]]:
    """Every equation of a jaxpr and of those inside of it, with its flops and how often it runs; all branches count."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        signature = Signature(eqn.primitive.name, eqn.params, *_types(eqn))
        described = has_rule(signature)
        yield eqn, loop_nest(signature).flops if described else 0.0, trips
        inside = trips * eqn.params["length"] if eqn.primitive.name == "scan" else trips
        for value in () if described else eqn.params.values():
            for each in value if isinstance(value, tuple | list) else (value,):
                if hasattr(each, "eqns") or hasattr(each, "jaxpr"):
                    yield from _work(each, inside)


def _sent(eqn: Any, trips: float, mesh: Mapping[str, int]) -> Sent | None:
    """A collective that an island does itself; its bytes follow the convention of `Mesh.collective_s`."""
    kind = _KINDS.get(eqn.primitive.name)
    if kind is None:
        return None
    names = eqn.params.get("axes", eqn.params.get("axis_name"))
    axes = tuple(a for a in ((names,) if isinstance(names, str) else names or ()) if isinstance(a, str))
    operands, results = _types(eqn)
    if not axes:
        return None
    size = sum(t.num_bytes for t in (results if kind == "all_gather" else operands))
    if kind == "all_to_all":
        size *= prod(mesh[a] for a in axes)
    return Sent(kind, axes, float(size), trips)


def _types(eqn: Any) -> tuple[tuple[TensorType, ...], tuple[TensorType, ...]]:
    operands, results = (tuple(_type(v.aval) for v in side) for side in (eqn.invars, eqn.outvars))
    return operands, results


def _type(aval: Any) -> TensorType:
    dtype = getattr(aval, "dtype", None)
    shape = tuple(getattr(aval, "shape", ()))
    return TensorType(shape, str(dtype), getattr(dtype, "itemsize", 0) or 0)


RULES: dict[str, Rule] = {ISLAND: shard_map}
