"""Reads the placements that Alpa's ``dump_debug_info`` writes, and judges them like a plan.

The files hold Python's printed form of nested containers of ``PlacementSpec``: dicts and ``FrozenDict`` (printed with
bare keys), tuples and named tuples, optimizer states, functions in angle brackets. `parse` reads that form; `read_dump`
makes tensors of it. A ``ShardingSpec`` has for each dim ``NoSharding()``, ``Chunked(n)`` or ``Unstacked(n)``, and for
each axis of the logical mesh which of these chunks it splits (``ShardedAxis``) or how often it repeats them
(``Replicated``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Printed
from meshwright.errors import PlanFileError
from meshwright.explain.alpa.repr_parser import Call, parse
from meshwright.explain.show.tensor_table import TensorTable, rows_of
from meshwright.hardware.clusters import AXIS_NAMES
from meshwright.parallelism.without_program import judge_tensors
from meshwright.plans.records.judgement import Judgement
from meshwright.plans.tensor import Spec, Tensor

INPUTS, OUTPUTS = "_input_placement_specs.txt", "_output_placement_specs.txt"
_OPTIMIZER = ("opt_state", "optimizer", "mu", "nu", "trace", "count")
_STATE = ("batch_stats", "step")
_DAMAGE = (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class AlpaMesh(Printed):
    """The tensors on one of Alpa's meshes; where there are several meshes, each is a pipeline stage.

    Attributes:
        number: Its number.
        shape: Sizes of the logical mesh by axis name, as far as the placements reveal them.
        arguments, results: The tensors on the mesh.
        judgement: Verdict and kinds.
    """

    number: int
    shape: Mapping[str, int]
    arguments: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    judgement: Judgement

    def __rich__(self) -> RenderableType:
        mesh = " × ".join(f"{name}={size}" for name, size in self.shape.items())
        head = f"mesh {self.number}: {mesh}\nverdict  {self.judgement.verdict}"
        tables = [
            TensorTable(tuple(rows_of(self.judgement, self.shape, tensors)), title)
            for title, tensors in (("arguments", self.arguments), ("results", self.results))
            if tensors
        ]
        return Group(Text(head, style="bold"), *tables)


@dataclass(frozen=True)
class AlpaDump(Printed):
    """A folder that Alpa dumped."""

    name: str
    meshes: tuple[AlpaMesh, ...]

    @property
    def verdict(self) -> str:
        """What kind of parallelism it is, mesh by mesh."""
        texts = [str(mesh.judgement.verdict) for mesh in self.meshes]
        if len(set(texts)) == 1:
            stages = f"pipeline of {len(texts)} stages, each " if len(texts) > 1 else ""
            return stages + texts[0]
        return "; ".join(f"mesh {m.number}: {text}" for m, text in zip(self.meshes, texts, strict=True))

    def __rich__(self) -> RenderableType:
        return Group(Text(f"Alpa's {self.name}\nverdict  {self.verdict}", style="bold"), *self.meshes)


def is_dump(folder: Path) -> bool:
    """Whether a folder holds any of Alpa's placements."""
    return any(folder.glob(f"*{INPUTS}")) or any(folder.glob(f"*{OUTPUTS}"))


def read_dump(folder: Path) -> AlpaDump:
    """Reads a folder of Alpa's.

    Raises:
        PlanFileError: Files are missing, or cannot be understood.
    """
    inputs = sorted(folder.glob(f"*{INPUTS}"))
    if not inputs:
        raise PlanFileError(f"{folder} lacks Alpa's *{INPUTS}; dump it again with alpa's dump_debug_info")
    if len(inputs) > 1:
        names = ", ".join(path.name for path in inputs)
        raise PlanFileError(f"{folder} has several dumps ({names}); put each into a folder of its own")
    name = inputs[0].name.removesuffix(INPUTS)
    outputs = folder / f"{name}{OUTPUTS}"
    if not outputs.exists():
        raise PlanFileError(f"{folder} lacks {outputs.name}; dump it again with alpa's dump_debug_info")
    arguments, results = _leaves(inputs[0]), _leaves(outputs)
    if not arguments and not results:
        raise PlanFileError(f"{folder}: {inputs[0].name} and {outputs.name} hold no PlacementSpec; dump them again")
    numbers = sorted({number for *_, placed in (*arguments, *results) for number in placed})
    try:
        return AlpaDump(name, tuple(_mesh(number, arguments, results) for number in numbers))
    except _DAMAGE as error:
        raise PlanFileError(
            f"{folder} cannot be understood: {error}; dump it again with alpa's dump_debug_info"
        ) from None


_Leaf = tuple[str, tuple[int, ...], str, dict[int, Call]]  # path, shape, dtype, sharding spec by mesh


def _leaves(path: Path) -> list[_Leaf]:
    try:
        tree = parse(path.read_text(encoding="utf-8"))
        return [_leaf("/".join(keys), spec) for keys, spec in _placements(tree, ())]
    except (OSError, *_DAMAGE) as error:
        raise PlanFileError(
            f"{path} cannot be understood: {error}; it must be what alpa's dump_debug_info wrote"
        ) from None


def _placements(tree: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Call]]:
    """Every PlacementSpec of a tree with the keys that lead to it; flat wrappers leave no key."""
    if isinstance(tree, Call):
        if tree.name == "PlacementSpec":
            yield keys, tree
            return
        if tree.name in ("FrozenDict", "dict", "list", "tuple") and len(tree.args) == 1:
            yield from _placements(tree.args[0], keys)
            return
        for i, value in enumerate(tree.args):
            yield from _placements(value, (*keys, str(i)))
        for name, value in tree.keywords.items():
            yield from _placements(value, (*keys, name))
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from _placements(value, (*keys, str(name)))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from _placements(value, (*keys, str(i)))


def _leaf(path: str, placement: Call) -> _Leaf:
    aval = placement.get("aval", 0)
    dtype, shape = aval.args[0]
    numbers, specs = placement.get("mesh_ids", 1), placement.get("sharding_specs", 2)
    if len(numbers) != len(specs):
        raise ValueError(f"{path} is on {len(numbers)} meshes but has {len(specs)} sharding_specs")
    whole = Call("ShardingSpec", ((), ()))  # Alpa leaves such tensors replicated
    return (
        path,
        tuple(shape),
        dtype,
        {n: whole if spec is None else spec for n, spec in zip(numbers, specs, strict=True)},
    )


def _mesh(number: int, arguments: Sequence[_Leaf], results: Sequence[_Leaf]) -> AlpaMesh:
    here = [[leaf for leaf in leaves if number in leaf[3]] for leaves in (arguments, results)]
    sizes = _sizes([leaf[3][number] for leaves in here for leaf in leaves])
    names = AXIS_NAMES[: len(sizes)]
    shape = dict(zip(names, sizes, strict=True))
    placed = [[_tensor(leaf, number, shape) for leaf in leaves] for leaves in here]
    inputs = tuple(replace(t, role=_role(t.path)) for t in placed[0])
    outputs = tuple(replace(t, path=f"out/{t.path}", role="result") for t in placed[1])
    return AlpaMesh(number, shape, inputs, outputs, judge_tensors([*inputs, *outputs], shape))


def _mapping(spec: Call) -> list[tuple[int, int]]:
    """For each axis of the logical mesh its size and the chunk it splits; -1 where it repeats."""
    chunks = _chunks(spec)
    mapping = []
    for entry in spec.get("mesh_mapping", 1):
        name = entry.name if isinstance(entry, Call) else str(entry)
        if name == "Replicated":
            mapping.append((entry.get("replicas", 0), -1))
        elif name == "ShardedAxis":
            axis = entry.get("axis", 0)
            if not 0 <= axis < len(chunks):
                raise ValueError(f"ShardedAxis({axis}) of a ShardingSpec that cuts {len(chunks)} dims")
            mapping.append((chunks[axis][1], axis))
        else:
            raise ValueError(f"a ShardingSpec maps to {name}, which is neither ShardedAxis nor Replicated")
    return mapping


def _chunks(spec: Call) -> list[tuple[int, int]]:
    """Every chunking of every dim: ``(dim, parts)``."""
    chunks = []
    for dim, how in enumerate(spec.get("sharding", 0)):
        name = how.name if isinstance(how, Call) else str(how)
        if name not in ("NoSharding", "Chunked", "Unstacked"):
            raise ValueError(f"a ShardingSpec has {name}, which is none of NoSharding, Chunked and Unstacked")
        if name != "NoSharding":
            parts = how.get("chunks" if name == "Chunked" else "size", 0)
            chunks += [(dim, n) for n in (parts if isinstance(parts, list | tuple) else [parts])]
    return chunks


def _sizes(specs: Sequence[Call]) -> list[int]:
    """Sizes of the mesh's axes: from the placement that distinguishes the most axes."""
    mappings = [[size for size, _ in _mapping(spec)] for spec in specs]
    return max(mappings, key=len, default=[1]) or [1]


def _tensor(leaf: _Leaf, number: int, mesh: Mapping[str, int]) -> Tensor:
    path, shape, dtype, specs = leaf
    spec, names = specs[number], list(mesh)
    axes: list[list[str]] = [[] for _ in shape]
    mapping, chunks = _mapping(spec), _chunks(spec)
    for place, (size, chunk) in enumerate(mapping):
        if chunk >= 0 and size > 1:
            axes[chunks[chunk][0]] += [names[place]] if len(mapping) == len(names) else _axes_of(size, mesh)
    split_dims: Spec = tuple(tuple(sorted(dim, key=names.index)) for dim in axes)
    return Tensor(path, shape, dtype, split_dims, "data")


def _axes_of(size: int, mesh: Mapping[str, int]) -> list[str]:
    """Axes of a mesh that together split into ``size`` parts: Alpa merges them in its mapping."""
    for name, n in mesh.items():
        if n == size:
            return [name]
    if prod(mesh.values()) == size:
        return list(mesh)
    raise ValueError(f"{size} parts fit no axes of a mesh of {dict(mesh)}")


def _role(path: str) -> str:
    parts = path.split("/")
    if "target" in parts:  # of an optimizer that holds its parameters
        return "parameters"
    if any(part in _OPTIMIZER for part in parts):
        return "optimizer"
    if "params" in parts:
        return "parameters"
    return "state" if any(part in _STATE for part in parts) else "data"
