"""Runs a plan on the devices of this process: one program for all of them, constrained at every operation.

The function is traced again and evaluated equation by equation. Each operand is brought to the sharding that its
operation needs, hop by hop, and each result is constrained to the sharding of the plan, so that XLA's partitioner has
nothing left to guess. The constraints move data and never change its values.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate, pairwise
from threading import local
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as DeviceMesh
from jax.tree_util import tree_flatten, tree_leaves

from meshwright import jax_compat
from meshwright.errors import ClusterError, ShardingError, TraceError
from meshwright.graph.tracing.call import Leaves
from meshwright.graph.tracing.planned_mesh import planned
from meshwright.plans.compiler_options import options_of
from meshwright.plans.plan import PlanData, partition_spec
from meshwright.plans.tensor import Tensor
from meshwright.runtime import interrupts
from meshwright.runtime.cpu_turns import in_turn
from meshwright.runtime.microbatches.planned_parts import call_as_planned
from meshwright.runtime.processes.sharing import put
from meshwright.runtime.program.backend import OnDevices
from meshwright.runtime.program.evaluate import Evaluator

# How XLA's errors of a run begin; "INVALID_ARGUMENT" is said of arguments, which the other way of calling moves.
_STATUS = re.compile(r"(?!INVALID_ARGUMENT)[A-Z_]+: ")


def compiler_options(platform: str) -> dict[str, Any]:
    """XLA's options for a platform, without the options that the user's own flags set."""
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options_of(platform).items() if name not in flags}


def device_mesh(plan: PlanData, devices: Sequence[Any] | None = None) -> DeviceMesh:
    """The plan's mesh made of real devices.

    Raises:
        ClusterError: There are not as many devices as the plan is for, or some process would have none of them.
        ShardingError: The plan has stages.
    """
    if plan.stages:
        raise ShardingError(
            f"the plan is a pipeline of {len(plan.stages)} stages, which are several programs: run it by "
            "mw.parallelize(function, method=plan)"
        )
    found = list(jax.devices() if devices is None else devices)
    chosen = found[: plan.mesh.num_devices]
    if len(chosen) < plan.mesh.num_devices or (devices is None and _idle_processes(chosen)):
        raise ClusterError(_wrong_devices(plan, found))
    kinds = (AxisType.Auto,) * len(plan.mesh.names)
    return jax.make_mesh(plan.mesh.sizes, plan.mesh.names, axis_types=kinds, devices=chosen)


def _idle_processes(devices: Sequence[Any]) -> set[int]:
    return set(range(jax.process_count())) - {d.process_index for d in devices}


def _wrong_devices(plan: PlanData, found: Sequence[Any]) -> str:
    """The message that names the devices found, the devices the plan needs, and what to do about the difference."""
    count, cluster = jax.process_count(), plan.mesh.cluster
    there = f"there are {len(found)}, in {count} process{'es' if count > 1 else ''}"
    said = f"the plan is for {plan.mesh.num_devices} devices and {there}"
    if len(found) >= plan.mesh.num_devices:
        idle = sorted(_idle_processes(found[: plan.mesh.num_devices]))
        return f'{said}: process {idle[0]} would have none; plan for cluster="local", or start fewer processes'
    if cluster is not None and cluster.num_hosts > count:
        return (
            f"{said}; its cluster has {cluster.num_hosts} hosts of {cluster.devices_per_host}: start a process on each "
            'of them, which calls mw.initialize() before all else, or plan for cluster="local"'
        )
    return f'{said}; run it where there are enough, or plan for cluster="local"'


def spmd(plan: PlanData, function: Callable[..., Any], devices: Sequence[Any] | None = None) -> "Program":
    """The function, compiled to run as the plan says.

    Args:
        plan: A plan that was made for this function.
        function: The function.
        devices: Devices to use; all local ones by default.

    Returns:
        A function of the same arguments and results, spread over the devices. As with `jax.jit`, its `lower` gives the
        program for some arguments without running it.
    """
    return Program(plan, function, device_mesh(plan, devices))


class Strange(Exception):
    """The quick call met arguments of other types than before, or arrays that have other shardings than it needs."""


@dataclass(frozen=True)
class _Variant:
    """The compiled function for one structure of the arguments and one set of leaves that are not arrays.

    Attributes:
        jitted: The function of the arrays: arguments and results have None in place of leaves that are not arrays.
        run: The same function, which runs one program at a time where the devices need that.
        arguments: The structure of its arguments.
        shardings: The shardings of their arrays.
        results: The structure of the results, with the leaves that are not arrays.
    """

    jitted: Any
    run: Callable[..., Any]
    arguments: Leaves
    shardings: Sequence[NamedSharding]
    results: Leaves

    @property
    def is_plain(self) -> bool:
        """Whether all arguments and results are arrays, so that `jitted` can be called directly."""
        return None not in self.arguments.positions and None not in self.results.positions


class Program:
    """A function that runs as a plan says.

    Attributes:
        plan: The plan.
        mesh: Its mesh, of real devices.
        quick: The compiled function where the arguments are like those of the last call; raises `Strange` (or, as
            `jax.jit` does, ValueError or TypeError) where they are not. The caller then calls the program itself.
    """

    def __init__(self, plan: PlanData, function: Callable[..., Any], mesh: DeviceMesh):
        self.plan = plan
        self.mesh = mesh
        self.quick: Callable[..., Any] = _strange
        self._function = function
        self._variants: dict[Any, _Variant] = {}
        self._ran: set[int] = set()  # variants, by identity
        self._tracing = local()

    def __call__(self, *args: Any) -> Any:
        try:
            return self.quick(*args)
        except (Strange, TypeError, ValueError):
            refuse_tracing(getattr(self._function, "__name__", "the function"))
            variant, arrays = self._variant(args)
        _check_there(_arrays(self.plan.arguments), arrays)
        # In JAX an array's sharding is part of its type: without this, the program would be compiled once for a fresh
        # state and again for a state that an earlier call returned.
        placed = variant.arguments.bare.fill(_place(arrays, variant.shardings))
        with self._allow_tracing():
            made = self._run(variant, placed) if id(variant) in self._ran else self._run_first(variant, placed)
        if variant.is_plain:
            self.quick = _guarded(variant.run, _donated_places(self.plan, variant))
            return made
        return variant.results.fill(tree_leaves(made))

    def _run(self, variant: _Variant, placed: Sequence[Any]) -> Any:
        with interrupts.hold:
            return variant.run(*placed)

    def _run_first(self, variant: _Variant, placed: Sequence[Any]) -> Any:
        """Runs a variant for the first time and waits for it, so that its errors are raised here.

        A lack of memory is found before the arguments are donated, so that none of them is lost.
        """
        if donated_arguments(self.plan, variant.arguments.tree):
            _try_memory(variant.jitted.lower(*placed).compile(), self.mesh)  # the call reuses this compilation
        with interrupts.hold:
            made = jax.block_until_ready(variant.run(*placed))
            self._ran.add(id(variant))
            return made

    def compile(self, *args: Any) -> jax.stages.Compiled:
        """The compiled program for arguments or their types; a call with their like finds it compiled."""
        variant, arrays = self._variant(args)
        types = [
            jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=place, weak_type=t.weak_type)
            for t, place in zip(map(jax_compat.abstract, arrays), variant.shardings, strict=True)
        ]
        with self._allow_tracing():
            return variant.jitted.lower(*variant.arguments.bare.fill(types)).compile()

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """JAX's lowering for these arguments, with None in place of leaves that are not arrays."""
        variant, arrays = self._variant(args)
        kinds = map(jax_compat.abstract, arrays)  # types only: arrays may have other shardings
        types = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in kinds]
        with self._allow_tracing():
            return variant.jitted.lower(*variant.arguments.bare.fill(types))

    def _variant(self, args: tuple[Any, ...]) -> tuple[_Variant, list[Any]]:
        leaves, tree = tree_flatten(args)
        tensors = self.plan.arguments
        if len(leaves) != len(tensors):
            raise ShardingError(
                f"the plan is for arguments of {len(tensors)} leaves and was given {len(leaves)}; call the function "
                "with arguments like those it was planned for, or make the plan again"
            )
        kept = tuple(leaf for leaf, tensor in zip(leaves, tensors, strict=True) if tensor.role == "static")
        if (tree, kept) not in self._variants:
            self._variants[tree, kept] = self._make(args)
        arrays = [leaf for leaf, tensor in zip(leaves, tensors, strict=True) if tensor.role != "static"]
        return self._variants[tree, kept], arrays

    def _make(self, args: tuple[Any, ...]) -> _Variant:
        with planned(self.plan.mesh, self.mesh):
            cluster = self.plan.mesh.cluster
            call = call_as_planned(self.plan, self._function, args, cluster)
        arguments, results = call.arguments.bare, call.results.bare
        taken, made = _arrays(self.plan.arguments), _arrays(self.plan.results)
        check_types(taken, call.program.input_types)
        check_types(made, call.program.output_types)

        @wraps(self._function)
        def run(*args: Any) -> Any:
            if not getattr(self._tracing, "allowed", False):
                raise Strange
            leaves = tree_leaves(args)
            check_types(taken, map(jax_compat.abstract, leaves))
            specs = ([t.spec for t in tensors] for tensors in (taken, made))
            outs = Evaluator(self.plan, OnDevices(self.plan, self.mesh)).run(call.program, leaves, *specs)
            return results.fill(outs)

        shardings = self._shardings(taken)
        jitted = jax.jit(
            run,
            in_shardings=arguments.fill(shardings),
            out_shardings=results.fill(self._shardings(made)),
            donate_argnums=donated_arguments(self.plan, arguments.tree),
            compiler_options=compiler_options(self.mesh.devices.flat[0].platform),
        )
        return _Variant(jitted, in_turn(jitted, self.mesh.devices.ravel()), call.arguments, shardings, call.results)

    @contextmanager
    def _allow_tracing(self) -> Iterator[None]:
        """Lets JAX trace the function in this thread; in other threads the quick call must not start to compile."""
        self._tracing.allowed = True
        try:
            yield
        finally:
            self._tracing.allowed = False

    def _shardings(self, tensors: Iterable[Tensor]) -> list[NamedSharding]:
        return [NamedSharding(self.mesh, partition_spec(t.spec)) for t in tensors]


def _try_memory(compiled: Any, mesh: DeviceMesh) -> None:
    """Allocates as much memory as a program needs beside its arguments, and frees it."""
    memory = compiled.memory_analysis()
    if memory is None:  # not every backend reports it
        return
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    sizes = [size for size in (memory.temp_size_in_bytes, results) if size > 0]  # two separate allocations
    everywhere = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    for room in jax.jit(lambda: [jnp.zeros(mesh.size * n, jnp.uint8) for n in sizes], out_shardings=everywhere)():
        room.block_until_ready().delete()


def _strange(*args: Any) -> NoReturn:
    raise Strange


def _guarded(run: Callable[..., Any], places: Mapping[int, Sequence[NamedSharding]]) -> Callable[..., Any]:
    """The compiled function, which refuses deleted arrays, and donated arguments that would first have to be moved."""

    known = {number: list(shardings) for number, shardings in places.items()}

    def quick(*args: Any) -> Any:
        if jax_compat.is_tracing():
            raise Strange
        for number, arg in enumerate(args):
            leaves = tree_leaves(arg)
            for leaf in leaves:
                if getattr(leaf, "is_deleted", bool)():  # a donated array would end the process
                    raise Strange
            shardings = known.get(number, [])
            for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=False)):
                found = getattr(leaf, "sharding", None)
                if found is not sharding:
                    if found != sharding:
                        raise Strange
                    shardings[i] = found  # comparing identical objects is quicker
        with interrupts.hold:
            try:
                return run(*args)
            except ValueError as error:
                # Collectives that fail at once raise this, too. If arguments were donated, their types were right.
                is_late = any(getattr(leaf, "is_deleted", bool)() for leaf in tree_leaves(args))
                if is_late or _STATUS.match(str(error)):  # JAX 0.11 marks donated arrays only after it has returned
                    raise jax.errors.JaxRuntimeError(str(error)) from error
                raise

    return quick


def _donated_places(plan: PlanData, variant: _Variant) -> dict[int, Sequence[NamedSharding]]:
    """The shardings of the arrays of each donated argument."""
    tree = variant.arguments.tree
    leaves = argument_leaves(tree)
    return {number: variant.shardings[leaves[number]] for number in donated_arguments(plan, tree)}


def _place(arrays: list[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """The arrays in their shardings; `jax.device_put` alone takes far longer over arrays that have them already."""
    arrays = [x.array() if hasattr(x, "array_type") else x for x in arrays]  # stacks of a pipeline's layers
    pairs = enumerate(zip(arrays, shardings, strict=True))
    moved = [i for i, (x, sharding) in pairs if not (getattr(x, "committed", False) and x.sharding == sharding)]
    placed = list(arrays)
    # A replicated array may share the caller's buffer, which would be deleted when the array is donated.
    own = [x.copy() if isinstance(x, jax.Array) else x for x in (arrays[i] for i in moved)]
    for i, array in zip(moved, put(own, [shardings[i] for i in moved]), strict=True):
        placed[i] = array
    return placed


def _arrays(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t for t in tensors if t.role != "static"]


def check_types(planned: Sequence[Tensor], given: Iterable[Any]) -> None:
    """Refuses arrays of other types than the plan was made for."""
    types = [(tuple(t.shape), str(t.dtype)) for t in given]
    for tensor, found in zip(planned, types, strict=False):
        if found != (tensor.shape, tensor.dtype):
            raise ShardingError(
                f"the plan has {tensor.path} as {tensor.dtype}{list(tensor.shape)} and it is "
                f"{found[1]}{list(found[0])} here: it was made for another function, other shapes or other dtypes; "
                "make the plan again with these arguments"
            )
    if len(planned) != len(types):
        raise ShardingError(
            f"the plan has {len(planned)} arrays among the arguments or results where this function has {len(types)}: "
            "it was made for another function; make the plan again with these arguments"
        )


def refuse_tracing(name: str) -> None:
    """Refuses a call from within another function that JAX transforms or compiles.

    Raises:
        TraceError: Such a function is being traced.
    """
    if jax_compat.is_tracing():
        raise TraceError(
            f"{name} is parallelised, and was called from within jax.jit, jax.grad, jax.vmap or another function that "
            "JAX traces: it plans and compiles for real arrays, so it must be the outermost function. Parallelise the "
            f"outer one instead: mw.parallelize(jax.grad({name})), not jax.grad(mw.parallelize({name})); jax.jit is "
            "not needed around it"
        )


def _check_there(planned: Sequence[Tensor], given: Iterable[Any]) -> None:
    """Refuses arrays that were donated to an earlier call: XLA may end the process over them."""
    for tensor, array in zip(planned, given, strict=False):
        if isinstance(array, jax.Array) and array.is_deleted():
            raise ShardingError(
                f"{tensor.path} is gone: it was donated to an earlier call, or deleted. Continue with the results "
                "of that call, or keep arguments with donate_argnums=()"
            )


def donated_arguments(plan: PlanData, tree: Any) -> tuple[int, ...]:
    """Arguments of which the plan donates every leaf."""
    arrays = [_arrays(plan.arguments[leaves]) for leaves in argument_leaves(tree)]
    return tuple(number for number, found in enumerate(arrays) if found and all(t.donated for t in found))


def argument_leaves(tree: Any) -> list[slice]:
    """The slice of each argument's leaves among all leaves, given the structure of the tuple of arguments."""
    ends = [0, *accumulate(child.num_leaves for child in tree.children())]
    return [slice(start, stop) for start, stop in pairwise(ends)]
