"""`mw.parallelize`: makes a function that is planned for the arguments of its first call, and runs as planned."""

import logging
import os
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, update_wrapper
from os import PathLike
from typing import TYPE_CHECKING, Any

import jax
from jax.tree_util import tree_flatten

from meshwright.errors import DeviceOutOfMemory, ShardingError
from meshwright.facade import Plan
from meshwright.graph import Traced, trace
from meshwright.graph.tracing.planned_mesh import planned
from meshwright.graph.tracing.trace import returning
from meshwright.hardware import Cluster, Mesh
from meshwright.hardware.axes import Shape
from meshwright.hardware.load import is_local
from meshwright.pipeline.search.equal_stages import ThreeD
from meshwright.plan_files import PLANS
from meshwright.plan_files.known_plans import known_or_made, of_call
from meshwright.planner.method_names import find_method
from meshwright.planner.methods import AUTO, Auto, Method
from meshwright.planning import key_of, plan_traced
from meshwright.plans.plan import PlanData
from meshwright.profiler import cluster as find_cluster
from meshwright.progress import progress
from meshwright.runtime.processes.sharing import announce, enter, leave, meet_to_measure, runs, shared_plan
from meshwright.runtime.spmd import Program, Strange, check_types, device_mesh, refuse_tracing
from meshwright.runtime.stages.pipeline_program import PipelineProgram, why_not_cut
from meshwright.training.arguments import Arguments, Bound, argument_numbers, batch_and_state, named_arguments
from meshwright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from meshwright.training.recorded_step import RecordedStep

log = logging.getLogger("meshwright")


def parallelize(
    function: Callable[..., Any] | None = None,
    *,
    cluster: Cluster | str | None = None,
    mesh: Mesh | Shape | None = None,
    method: Method | PlanData | str | None = None,
    microbatches: int | str | None = None,
    donate_argnums: str | int | Sequence[int] = "auto",
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    batch_argnums: int | Sequence[int] | None = None,
    state_argnums: int | Sequence[int] | None = None,
    plans: str | PathLike[str] | None = None,
) -> Any:
    """Makes a single-device function run on many devices; to be called directly or as a decorator.

    The first call with arguments of some shapes plans and compiles; later ones go straight to the compiled program.

    Args:
        function: An ordinary JAX function, such as a train step from a state and a batch to a new state and metrics.
        cluster: What `mw.plan` takes; the local devices by default.
        mesh: One logical mesh, or its shape on the cluster, instead of all views of the cluster.
        method: A method or its short name, such as ``"zero3"``; `mw.Auto()` by default. Or a plan for these arguments,
            such as one from `mw.Plan.load`. With `mw.Auto(pipeline=True)` and `mw.ThreeD` the function runs in stages.
        microbatches: Into how many parts the batch is cut; the parts run one after the other and their gradients are
            added up, so that a step needs less memory. By default the method decides: as many as the memory needs. The
            results are those of the whole batch. If that cannot be proven for a given number (batch norm), the batch
            runs whole, and a warning and the plan's remarks say why.
        donate_argnums: Arguments whose memory the results may take over: they cannot be used after the call. By default
            these are the arguments that come back complete as results, such as a state.
        static_argnums: Arguments that are not arrays but values the function is compiled for; they must be hashable.
        static_argnames: The same by name, including keyword-only arguments.
        batch_argnums: Arguments whose leaves are examples stacked along their first dim: by default the first that is
            neither state nor static.
        state_argnums: Arguments that make up the state, for `create_state` and `restore`, such as ``(0, 1)`` where
            parameters and optimizer state are apart: by default the first that is no batch.
        plans: A directory in which plans are kept, such as one beside the checkpoints. A run that is started again, on
            devices that it was planned for before, takes that plan. By default the environment's ``MESHWRIGHT_PLANS``,
            which `meshwright.ray` sets; nothing is kept where there is none.

    Returns:
        A `Parallelized` function.

    Examples:
        >>> import jax, jax.numpy as jnp, meshwright as mw
        >>> @mw.parallelize(cluster="1x1 cpu")
        ... def step(state, x):
        ...     loss, grad = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(state["w"])
        ...     return {"w": state["w"] - 0.1 * grad}, loss
        >>> state, loss = step({"w": jnp.ones(4)}, jnp.ones((8, 4)))
        >>> float(loss), step.plan(state, jnp.ones((8, 4))).mesh.num_devices
        (16.0, 1)
    """
    if function is not None and not callable(function):
        raise ShardingError(f"parallelize was given {function!r:.60}; give a function, and options by name")
    if function is None:
        given = {k: v for k, v in locals().items() if k != "function"}
        return partial(parallelize, **given)
    plan = method if isinstance(method, PlanData) else None
    chosen = find_method(None if isinstance(method, PlanData) else method)
    numbers = _numbers(function, donate_argnums, static_argnums, static_argnames, batch_argnums, state_argnums)
    if microbatches is not None:
        chosen = replace(chosen, microbatches=microbatches)
    return Parallelized(function, Settings(cluster, mesh, chosen, plan=plan, plans=plans, **numbers))


def _numbers(function, donate, static, static_names, batch, state) -> dict[str, Any]:
    """The numbers of arguments in `Settings`, each checked against the function."""
    by_name, names = named_arguments(static_names, function)
    static = (*argument_numbers("static_argnums", static, function), *by_name)
    batch, state = batch_and_state(batch, state, static)
    return {
        "donate_argnums": None if donate == "auto" else argument_numbers("donate_argnums", donate, function),
        "static_argnums": static,
        "static_argnames": names,
        "batch_argnums": batch,
        "state_argnums": state,
    }


@dataclass(frozen=True)
class Settings:
    """Options of `parallelize`.

    If ``donate_argnums`` is None, the arguments that come back as results are donated; ``plan`` is used instead of
    planning by the method.
    """

    cluster: Cluster | str | None
    mesh: Mesh | Shape | None
    method: Method
    donate_argnums: tuple[int, ...] | None
    static_argnums: tuple[int, ...]
    batch_argnums: tuple[int, ...]
    state_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...] = ()  # of keyword-only arguments
    plan: PlanData | None = None
    plans: str | PathLike[str] | None = None

    @cached_property
    def planned_for(self) -> Cluster | None:
        """The cluster that the function is traced for; None for the devices at hand."""
        mesh = self.mesh if self.plan is None else self.plan.mesh
        if isinstance(mesh, Mesh):
            return mesh.cluster
        return None if self.cluster is None or is_local(self.cluster) else find_cluster(self.cluster)


class Parallelized:
    """A function that runs on many devices; made by `parallelize`.

    Attributes:
        settings: How it is parallelised.
        recent: The program that was called last; None before the first call.
    """

    __name__: str

    def __init__(self, function: Callable[..., Any], settings: Settings):
        self.__name__ = type(function).__name__  # for a callable without a name
        self.function = function
        self.settings = settings
        self.recent: Program | PipelineProgram | None = None
        self._programs: dict[Any, Program | PipelineProgram] = {}
        self._plans: dict[Any, Plan] = {}
        self._read: dict[Any, frozenset[int]] = {}  # by key of calls, the Python numbers that the function's code reads
        self._arguments = Arguments(function, settings.static_argnums, settings.static_argnames)
        update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._call(args, kwargs)
        leave(result)
        return result

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        is_known = enter(self.recent)
        if self.recent is not None and is_known and not kwargs and not self.settings.static_argnums:
            try:
                return self.recent.quick(*args)
            except (Strange, TypeError, ValueError):
                pass
            except jax.errors.JaxRuntimeError as error:
                _explain(error, self.recent.plan, args)
                raise
        refuse_tracing(self.__name__)
        bound = self._arguments.bind(args, kwargs)
        announce(self.__name__, bound.names, bound.values)
        if bound.key() in self._programs:
            return self._run(bound)
        with progress() as say:
            say(f"tracing {self.__name__}")
            self._program(bound)
            say(f"compiling {self.__name__} with XLA")
            return self._run(bound)

    def _run(self, bound: Bound) -> Any:
        self.recent = program = self._program(bound)
        runs(program)
        try:
            return program(*bound.values)
        except jax.errors.JaxRuntimeError as error:
            _explain(error, program.plan, bound.values)
            raise

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments: arrays or `jax.ShapeDtypeStruct`s. Equal types are planned once.

        With several processes all of them must call this: the first one plans, and the others receive its plan.
        """
        return self._plan(self._arguments.bind(args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """JAX's lowering for these arguments, as `jax.jit` has it."""
        bound = self._arguments.bind(args, kwargs)
        return self._program(bound).lower(*bound.values)

    def program(self, *args: Any, **kwargs: Any) -> Program | PipelineProgram:
        """The program for these arguments, which runs as planned; of a pipeline all stages are compiled."""
        return self._program(self._arguments.bind(args, kwargs))

    def trace(self, *args: Any, **kwargs: Any) -> "tuple[Any, RecordedStep]":
        """The results of a step in stages, and when this process's stages did what, beside the simulated step.

        It is a call like any other, which all processes make; record one that follows others, since the first one has
        more to do.

        Raises:
            ShardingError: The step runs as one program; JAX's profiler shows what happens inside.
        """
        from meshwright.training.recorded_step import RecordedStep

        program = self._program(self._arguments.bind(args, kwargs))
        if isinstance(program, Program):
            raise ShardingError(f"{self.__name__} runs as one program; jax.profiler.trace shows what happens inside")
        with program.recording() as recording:
            result = self(*args, **kwargs)
        return result, RecordedStep(self.__name__, recording.events(), Plan.of(program.plan).simulate())

    def compiled(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        """The compiled program for these arguments: `lower` and compile."""
        return self.lower(*args, **kwargs).compile()

    @property
    def state_places(self) -> tuple[int, ...]:
        """Positions of the state among the arguments that are not static."""
        static = self.settings.static_argnums
        return tuple(number - sum(n < number for n in static) for number in self.settings.state_argnums)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans so far, the newest first."""
        return tuple(self._plans.values())[::-1]

    @property
    def last_plan(self) -> Plan | None:
        """The plan that was made or used last."""
        if self.recent is not None:
            return Plan.of(self.recent.plan)
        return next(reversed(self._plans.values()), None)

    def _program(self, bound: Bound) -> Program | PipelineProgram:
        key = self._key(bound)
        if key not in self._programs:
            plan = self._plan(bound)
            key = self._key(bound)  # planning may have found that it depends on more
            self._programs[key] = self._make(plan, bound)
        return self._programs[key]

    def _make(self, plan: Plan, bound: Bound) -> Program | PipelineProgram:
        if not plan.stages:
            return Program(plan, bound.function, device_mesh(plan))
        traced = self._donating(trace(bound.function, *bound.values, cluster=self.settings.planned_for), bound)
        with progress() as say:
            say(f"cutting {self.__name__} into stages")
            program = PipelineProgram(plan, traced, self._batch())
            program.compile(say)
        return program

    def _key(self, bound: Bound) -> Hashable:
        """A key that is equal for calls with the same plan; a Python number counts as an array unless code reads it."""
        key = bound.key()
        return (key, bound.key_of_read(self._read[key])) if key in self._read else key

    def _plan(self, bound: Bound) -> Plan:
        key = self._key(bound)
        plan = self._plans.get(key)
        if plan is None:
            if self.settings.method.microbatches not in (AUTO, 1) or isinstance(self.settings.method, ThreeD):
                bound.check_batch(self.settings.batch_argnums)
            announce(f"the planning of {self.__name__}", bound.names, bound.values, is_next=True)
            before = self.last_plan
            started = time.perf_counter()
            with planned(self._mesh):
                cluster = self.settings.planned_for
                traced = self._donating(trace(bound.function, *bound.values, cluster=cluster), bound)
            meet_to_measure(self.settings.cluster, self.settings.mesh)
            plan = Plan.of(shared_plan(self.__name__, traced, lambda: self._plan_traced(traced)))
            if read := bound.read(plan.arguments):
                self._read[bound.key()] = read | self._read.get(bound.key(), frozenset())
            self._plans[self._key(bound)] = plan
            seconds = format_seconds(time.perf_counter() - started)
            if before is not None:
                log.warning("%s: planned again in %s, since %s", self.__name__, seconds, _difference(before, plan))
        return plan

    @property
    def _mesh(self) -> Mesh | Shape | None:
        """The mesh, if it is known before planning; a pipeline has several."""
        plan = self.settings.plan
        return self.settings.mesh if plan is None else None if plan.stages else plan.mesh

    def _plan_traced(self, traced: Traced) -> Plan:
        settings, method = self.settings, self.settings.method
        if settings.plan is not None:
            return _taken(settings.plan, traced)
        where = settings.plans or os.environ.get(PLANS)
        key = key_of(traced, settings.cluster, settings.mesh, method) if where else None
        if not where or key is None:
            return self._plan_anew(traced)
        return Plan.of(known_or_made(where, key, traced, lambda last: self._plan_anew(traced, last)))

    def _plan_anew(self, traced: Traced, last: PlanData | None = None) -> Plan:
        settings, method = self.settings, self.settings.method
        plan = plan_traced(traced, settings.cluster, settings.mesh, method, self._batch(), last=last)
        if plan.stages and isinstance(method, Auto) and (reason := why_not_cut(plan, traced, self._batch())):
            whole = Auto(memory_fraction=method.memory_fraction, seconds=method.seconds, pipeline=False)
            plan = plan_traced(traced, settings.cluster, settings.mesh, whole, self._batch())
            remark = f"The step runs as one program, although a pipeline would be quicker: {reason}."
            log.warning("%s: %s", self.__name__, remark)
            return replace(plan, remarks=(remark, *plan.remarks))
        return plan

    def _batch(self) -> list[int]:
        """Positions of the batch among the arguments that are not static."""
        static, batch = self.settings.static_argnums, self.settings.batch_argnums
        return [number - sum(n < number for n in static) for number in batch]

    def _donating(self, traced: Traced, bound: Bound) -> Traced:
        """The traced function with its donated arguments marked."""
        graph, owners = traced.graph, traced.call.arguments.owners
        names = dict(zip(bound.names, bound.numbers, strict=True))
        if self.settings.donate_argnums is None:
            back = set(graph.state.values())
            stays = {owner for i, owner in enumerate(owners) if i not in back}
            donated = frozenset(i for i, owner in enumerate(owners) if owner not in stays)
        else:
            donated = frozenset(i for i, owner in enumerate(owners) if names[owner] in self.settings.donate_argnums)
            traced = returning(traced, donated)
        return replace(traced, graph=replace(traced.graph, donated=donated | graph.donated))


def _taken(plan: PlanData, traced: Traced) -> Plan:
    """A plan that the user gives, for a function."""
    types = traced.call.program.input_types
    taken = [t for t in plan.arguments if t.role != "static"]
    if len(taken) != len(types):
        raise ShardingError(
            f"the plan is for {len(taken)} arrays as arguments, and the function has {len(types)}; make the plan again"
        )
    check_types(taken, types)
    return Plan.of(of_call(plan, traced))


def _difference(before: Plan, after: Plan) -> str:
    """How the arguments changed from one plan to the next."""
    tensors = {t.path: t for t in before.arguments}
    for tensor in after.arguments:
        old = tensors.get(tensor.path)
        if old is None:
            return f"{tensor.path} is new"
        if (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
            return (
                f"{tensor.path} changed from {old.dtype}{list(old.shape)} to {tensor.dtype}{list(tensor.shape)}; "
                "pad to one shape to plan and compile once"
            )
    return (
        "its arguments have another structure or static value; leaves that are not arrays must be equal from call to "
        "call: create an optimizer or activation function once, not with each state"
    )


def _explain(error: Exception, plan: PlanData, args: Sequence[Any]) -> None:
    """If memory ran out, raises an error that says what to do about it."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return
    leaves = [x for x in tree_flatten(args)[0] if isinstance(x, jax.Array)]
    lost = any(x.is_deleted() for x in leaves)
    state = "some of its arguments were donated and are gone: restore them" if lost else "its arguments are intact"
    first = str(error).strip().splitlines()[0]
    raise DeviceOutOfMemory(
        f"a device ran out of memory ({first:.200}). The plan counts on {format_bytes(plan.memory.peak_bytes)} on each "
        f"device; {state}. Use more microbatches, jax.checkpoint around the layers, a lower memory_fraction in the "
        "method, or more devices."
    ) from error
