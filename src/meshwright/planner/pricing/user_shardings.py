"""Holds plans to the shardings that the user wrote: checks them, and keeps the strategies that they allow."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.graph import Graph, Op
from meshwright.hardware import Mesh
from meshwright.rules.base import LoopNest, Signature
from meshwright.rules.families.islands import ISLAND, manual_axes
from meshwright.rules.written import written
from meshwright.strategy.candidates import Candidates, result_holders


def as_written(op: Op, nest: LoopNest, mesh: Mesh, found: Candidates) -> Candidates:
    """The strategies that give an operation's result the sharding that the user wrote; all of them if none was.

    Raises:
        ShardingError: There is none.
    """
    keep = _as_written(op.signature, nest, mesh, found)
    if keep is None:
        return found
    if not keep.any():
        raise ShardingError(_refusal(op.signature, mesh, op.source or op.label))
    return Candidates(found.loops[keep], found.scatter[keep])


def _as_written(op: Signature, nest: LoopNest, mesh: Mesh, found: Candidates) -> NDArray[np.bool_] | None:
    """Which strategies of an operation do as the user wrote; None if nothing was written."""
    used = {name: axis for axis, name in enumerate(mesh.names) if mesh.sizes[axis] > 1}
    if op.primitive == ISLAND:
        order = {name: loop for loop, name in enumerate(manual_axes(op))}
        wanted = [order.get(name, -1) if name in used else -1 for name in mesh.names]
        return np.array((found.loops == np.array(wanted)).all(axis=1))
    asked = written(op)
    if asked is None:
        return None
    held = result_holders(nest, found.loops, found.scatter, 0)
    keep = np.ones(len(held), bool)
    unconstrained = [d for d, dim in enumerate(asked.dims) if dim is None]
    for name, axis in used.items():
        where = [d for d, dim in enumerate(asked.dims) if dim and name in dim]
        if where or name not in asked.open:
            keep &= np.isin(held[:, axis], where or [-1, *unconstrained])
    return keep


def meshes_as_written(graph: Graph, meshes: Sequence[Mesh]) -> list[Mesh]:
    """The meshes on which every sharding that the user wrote has a meaning.

    Raises:
        ShardingError: There is none; the message names the source line, the axis, the mesh and the remedy.
    """
    places = _places(graph)
    if not places:
        return list(meshes)
    reasons = {mesh: next(filter(None, (_reason(op, mesh) for op, _ in places)), "") for mesh in meshes}
    if fit := [mesh for mesh, reason in reasons.items() if not reason]:
        return fit
    mesh = meshes[0]
    op, index = next((op, index) for op, index in places if _reason(op, mesh))
    raise ShardingError(_refusal(op, mesh, graph.ops[index].source or graph.ops[index].label))


def names_axes(graph: Graph) -> bool:
    """Whether the user wrote shardings into the function."""
    return bool(_places(graph))


def refuse_stages(graph: Graph) -> None:
    """Refuses to cut a function into stages in which the user wrote shardings.

    Raises:
        ShardingError: There are some; the message names the first one's source line.
    """
    for _, index in _places(graph):
        raise ShardingError(
            f"{graph.ops[index].source or graph.ops[index].label}: a pipeline gives each stage a mesh of its own, and "
            "this sharding names the axes of one mesh; plan the function as one program, without pipeline=True or "
            "mw.ThreeD, or remove its shardings"
        )


def differing(graph: Graph) -> list[str]:
    """A remark on each value that two constraints want in two shardings; both hold, and the value is resharded."""
    columns, found = graph.columns, dict[str, None]()
    number = [n for n, op in enumerate(columns.signatures) if op.primitive == "sharding_constraint"]
    earlier: dict[int, int] = {}  # constraint of each value, or the constraint that made it
    for index in np.flatnonzero(np.isin(columns.signature, number)).tolist():
        value, asked = int(columns.reads_of(index)[0]), written(columns.signatures[columns.signature[index]])
        other = earlier.get(value)
        if other is not None and asked is not None:
            before = written(columns.signatures[columns.signature[other]])
            if before is not None and before.dims != asked.dims:
                places = f"{graph.ops[other].source} and {graph.ops[index].source}"
                found[
                    f"Two constraints ask for one value as {before} and as {asked}, at {places}: both hold, and the "
                    "value is resharded between them. Leave one out if that is not meant."
                ] = None
        earlier[int(columns.first_made[index])] = earlier[value] = index
    return list(found)


def call_remarks(calls: Iterable[Any]) -> list[str]:
    """Says which shardings are not followed: those that `jax.jit` was given inside of the planned function.

    Args:
        calls: The equations of these calls.
    """
    found = dict.fromkeys((eqn.params.get("name"), jax_compat.source_line(eqn)) for eqn in calls)
    return [
        f"The in_shardings and out_shardings of jax.jit({name}){f', called at {line},' if line else ''} are not "
        "followed. Fix arguments and results of the planned function by mw.Auto(fix={path: P(…)}), and values inside "
        "of it by jax.lax.with_sharding_constraint."
        for name, line in found
    ]


def _places(graph: Graph) -> list[tuple[Signature, int]]:
    """Operations for which the user wrote shardings, with the first place of each."""
    columns = graph.columns
    found = [(columns.signatures[number], index) for number, index in columns.examples.items()]
    return [(op, index) for op, index in found if op.primitive == ISLAND or written(op) is not None]


def _refusal(op: Signature, mesh: Mesh, where: str) -> str:
    """Why an operation cannot have the sharding that the user wrote, and what to do about it."""
    return f"{where}: {_reason(op, mesh) or _no_strategy(op, mesh)}"


def _reason(op: Signature, mesh: Mesh) -> str:
    """Why a sharding has no meaning on a mesh; empty if it has one."""
    if op.primitive == ISLAND:
        axes = manual_axes(op)
        return _other_mesh("shard_map", tuple(axes), dict(op.params["mesh"].shape), mesh)
    asked = written(op)
    assert asked is not None
    if reason := _other_mesh(f"{op.primitive} to {asked}", asked.axes, asked.mesh, mesh):
        return reason
    for size, dim in zip(op.results[0].shape, asked.dims, strict=True):
        parts = prod(mesh.shape[axis] for axis in dim or ())
        if size % parts:
            return (
                f"{op.primitive} to {asked}: a dim of {size} (shape {op.results[0].shape}) cannot be split evenly into "
                f"{parts}; choose another dim or mesh, or pad the dim"
            )
        if dim and list(dim) != sorted(dim, key=mesh.names.index):
            return f"{op.primitive} to {asked}: write the axes of a dim in the mesh's order, {', '.join(mesh.names)}"
    return ""


def _other_mesh(what: str, axes: Sequence[str], sizes: Mapping[str, int], mesh: Mesh) -> str:
    """Why axes of the user's mesh are not those of the planned one; empty if they are."""
    own = ", ".join(f"{name!r}: {size}" for name, size in sizes.items())
    for axis in axes:
        if axis not in mesh.shape:
            return (
                f"{what}: axis {axis!r} is not on mesh {mesh.shape}, whose axes are {', '.join(mesh.names)}; plan for "
                f"the mesh that it is written for, mesh={{{own}}}, or name axes of mw.current_mesh()"
            )
        if mesh.shape[axis] != sizes.get(axis, mesh.shape[axis]):
            return (
                f"{what}: axis {axis!r} has {sizes[axis]} devices in the function and {mesh.shape[axis]} on mesh "
                f"{mesh.shape}; plan for mesh={{{own}}}, or use mw.current_mesh() in the function: it is the planned "
                "mesh"
            )
    return ""


def _no_strategy(op: Signature, mesh: Mesh) -> str:
    if op.primitive == ISLAND:
        specs = f"{op.params['in_specs']} → {op.params['out_specs']}"
        return f"shard_map with {specs}: write the axes of a dim in the mesh's order, {', '.join(mesh.names)}"
    return (
        f"{op.primitive} cannot make its result as {written(op)} on mesh {mesh.shape}, since the operation keeps one "
        "of these dims whole; constrain its result by jax.lax.with_sharding_constraint instead"
    )
