"""Creates states in the shardings of a plan, and functions that use another function's shardings."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.errors import ShardingError
from meshwright.facade import Plan
from meshwright.graph import Traced
from meshwright.graph.tracing.call import Call, call_abstractly
from meshwright.planner.methods import Auto
from meshwright.planning import plan_traced
from meshwright.plans.plan import partition_spec
from meshwright.plans.tensor import Spec
from meshwright.progress import progress
from meshwright.runtime.cpu_turns import in_turn
from meshwright.runtime.placement import argument_shardings
from meshwright.runtime.processes.sharing import put
from meshwright.runtime.spmd import argument_leaves, check_types
from meshwright.runtime.stages.cutting.layer_stack import LayerStack, StackSharding
from meshwright.runtime.stages.placing import absent, from_host, is_here
from meshwright.training.parallelize import Parallelized, Settings, parallelize

T = TypeVar("T")


def create_state(init: Callable[..., T], *args: Any, like: Parallelized, example: Sequence[Any] = ()) -> T:
    """Runs ``init(*args)`` so that every array of its result is created in parts, each on its own device.

    Args:
        init: Creates the state, e.g. from a random key.
        *args: Its arguments.
        like: The function that the state is for. The state is its first argument that is not a batch, or the arguments
            of its `state_argnums`, of which ``init`` then returns a tuple.
        example: The other arguments of that function: arrays or `jax.ShapeDtypeStruct`s. May be omitted if the function
            has a plan already.

    Returns:
        The state in the shardings of the function's plan. Leaves that are not arrays, such as a step counter ``0`` or
        the switches of an Equinox module, are what ``init`` made them.

    Examples:
        >>> import jax, jax.numpy as jnp, meshwright as mw
        >>> @mw.parallelize(cluster="1x1 cpu")
        ... def step(state, x):
        ...     loss, grad = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(state["w"])
        ...     return {"w": state["w"] - 0.1 * grad}, loss
        >>> init = lambda key: {"w": jax.random.normal(key, (4,))}
        >>> state = mw.create_state(init, jax.random.key(0), like=step, example=(jnp.ones((8, 4)),))
        >>> state["w"].shape
        (4,)
    """
    _check_parallelized("create_state: like", like)
    if not isinstance(example, tuple | list):
        raise ShardingError(
            f"create_state: example is a {type(example).__name__}; give a tuple of {like.__name__}'s other arguments"
        )
    call = call_abstractly(init, args, keeps_numbers=True)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in call.program.output_types]
    plan = like.last_plan
    if example or plan is None:
        if not example:
            raise ShardingError(
                f"{like.__name__} has no plan yet: give example=(…), its other arguments, so that it can be planned"
            )
        plan = like.plan(*_with_state(call.results.fill(types), example, like))
    leaves = argument_leaves(plan.in_tree)
    placed = list(zip(plan.arguments, argument_shardings(plan), strict=True))
    of_leaves = [pair for place in like.state_places for pair in placed[leaves[place]]]
    is_array = chain((position is not None for position in call.results.positions), repeat(True))
    state = [pair for pair, array in zip(of_leaves, is_array, strict=False) if array and pair[0].role != "static"]
    check_types([tensor for tensor, _ in state], types)
    with progress() as say:
        say(f"making the state of {like.__name__} in parts")
        arrays = _make(call, call.arguments.pick(args), [sharding for _, sharding in state])
    return call.results.fill(arrays)


def _make(call: Call, args: Sequence[Any], shardings: Sequence[NamedSharding | StackSharding]) -> list[Any]:
    """The results of a call in some shardings; the devices of one mesh make only their own arrays."""
    parts = [part for i, sharding in enumerate(shardings) for part in _parts(i, sharding)]
    arrays: dict[tuple[int, int], Any] = {}
    for mesh in dict.fromkeys(sharding.mesh for _, _, sharding in parts):
        arrays |= _make_on(mesh, call, args, [part for part in parts if part[2].mesh == mesh])
    return [
        LayerStack([arrays[i, begin] for begin, _ in sharding.bounds], sharding)
        if isinstance(sharding, StackSharding)
        else arrays[i, 0]
        for i, sharding in enumerate(shardings)
    ]


_Part = tuple[int, slice, NamedSharding]  # the number of a result, its layers, and their sharding


def _parts(result: int, sharding: NamedSharding | StackSharding) -> list[_Part]:
    if not isinstance(sharding, StackSharding):
        return [(result, slice(0, None), sharding)]
    return [(result, slice(*rows), place) for rows, place in zip(sharding.bounds, sharding.pieces, strict=True)]


def _make_on(mesh: Any, call: Call, args: Sequence[Any], parts: Sequence[_Part]) -> dict[tuple[int, int], Any]:
    """The parts of a call's results that are on one mesh, by result and first layer."""

    def some(*args: Any) -> list[Any]:
        results = call.program.run(args)
        return [_rows(results[i], rows) for i, rows, _ in parts]

    names = [(i, rows.start) for i, rows, _ in parts]
    if not is_here(parts[0][2]):
        kinds = jax.eval_shape(some, *call.types)
        return dict(zip(names, map(absent, kinds, (sharding for _, _, sharding in parts)), strict=True))
    make = jax.jit(some, out_shardings=[sharding for _, _, sharding in parts])
    everywhere = NamedSharding(mesh, PartitionSpec())
    all_here = len({device.process_index for device in mesh.devices.flat}) == jax.process_count()
    given = put(args, [everywhere] * len(args)) if all_here else [from_host(x, everywhere) for x in args]
    return dict(zip(names, in_turn(make, mesh.devices.ravel())(*given), strict=True))


def _rows(array: Any, rows: slice) -> jax.Array:
    return array if rows.stop is None else array[rows]


def _with_state(state: Any, example: Sequence[Any], like: Parallelized) -> list[Any]:
    """All arguments of a function in their order."""
    places = like.settings.state_argnums
    if len(places) > 1 and not (isinstance(state, tuple) and len(state) == len(places)):
        raise ShardingError(
            f"create_state: {like.__name__} has its state in {len(places)} arguments, so init must return a tuple of "
            f"{len(places)}, and it returned a {type(state).__name__}"
        )
    every = list(example)
    for place, part in zip(places, state if len(places) > 1 else (state,), strict=True):
        every.insert(place, part)
    return every


def follow(function: Callable[..., Any], leader: Parallelized, **settings: Any) -> "Follower":
    """Parallelises a function so that its arguments have the shardings that another function gives them.

    Args:
        function: For example an evaluation step of the state, or of its parameters alone, and a batch.
        leader: The function that computed or trained them. It must have a plan when the follower is first called.
        **settings: As in `mw.parallelize`; the cluster, mesh and method are the leader's.

    Returns:
        The function, parallelised. Arguments are matched by their paths and shapes: ``params/w`` of the follower is
        ``state/params/w`` of the leader.

    Examples:
        >>> import jax, jax.numpy as jnp, meshwright as mw
        >>> @mw.parallelize(cluster="1x1 cpu")
        ... def step(state, x):
        ...     loss, grad = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(state["w"])
        ...     return {"w": state["w"] - 0.1 * grad}, loss
        >>> state, loss = step({"w": jnp.ones(4)}, jnp.ones((8, 4)))
        >>> evaluate = mw.follow(lambda state, x: (x @ state["w"]).mean(), step)
        >>> round(float(evaluate(state, jnp.ones((8, 4)))), 3)
        0.8
    """
    _check_parallelized("follow: the leader", leader)
    wrong = sorted({"cluster", "mesh", "method"} & settings.keys())
    if wrong:
        raise ShardingError(f"follow: {wrong[0]} is the leader's; leave it out")
    leading = leader.settings
    alike = {"batch_argnums": leading.batch_argnums} if len(leading.state_argnums) == 1 else {}
    inherited = parallelize(function, **{"method": leading.method, **alike, **settings}).settings
    return Follower(function, replace(inherited, cluster=leading.cluster, mesh=leading.mesh), leader)


def _check_parallelized(what: str, function: Any) -> None:
    if not isinstance(function, Parallelized):
        raise ShardingError(f"{what} is {function!r:.60}; give a function that mw.parallelize made")


class Follower(Parallelized):
    """A function that runs on another function's mesh, with its arguments in the other function's shardings."""

    def __init__(self, function: Callable[..., Any], settings: Settings, leader: Parallelized):
        super().__init__(function, settings)
        self.leader = leader

    def _plan_traced(self, traced: Traced) -> Plan:
        plan = self.leader.last_plan
        if plan is None:
            raise ShardingError(
                f"{self.leader.__name__} has no plan yet, so {self.__name__} cannot follow it; call it first, or its "
                ".plan(…) with example arguments"
            )
        if plan.stages:
            raise ShardingError(
                f"{self.leader.__name__} runs as a pipeline, whose parameters are on different devices, so "
                f"{self.__name__} cannot follow it; parallelise it with a pipeline of its own"
            )
        graph = traced.graph
        fix = {
            path: partition_spec(spec)
            for path, value in zip(graph.input_paths, graph.inputs, strict=True)
            if (spec := _spec_at(plan, path, graph.types[value].shape)) is not None
        }
        settings_method = self.settings.method
        method = Auto(
            fix=fix, memory_fraction=settings_method.memory_fraction, microbatches=settings_method.microbatches
        )
        return plan_traced(traced, None, plan.mesh, method, self._batch())


def _spec_at(plan: Plan, path: str, shape: tuple[int, ...]) -> Spec | None:
    """The plan's sharding of the state's leaf whose path is, or ends in, this one; None if there is none."""
    kept = [t for t in plan.arguments if t.role in ("parameters", "optimizer") and t.shape == shape]
    exact = [t.spec for t in kept if t.path == path]
    specs = exact or [t.spec for t in kept if t.path.endswith(f"/{path}")]
    return specs[0] if len(specs) == 1 else None
