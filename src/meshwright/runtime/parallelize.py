"""`mw.parallelize`: a function that plans itself for the arguments it is called with, and runs as planned."""

import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, update_wrapper, wraps
from typing import Any

import jax
from jax.tree_util import tree_flatten

from meshwright import jax_compat
from meshwright.errors import DeviceOutOfMemory, ShardingError
from meshwright.graph import Traced, trace
from meshwright.graph.call import argument_names
from meshwright.hardware import Cluster, Mesh
from meshwright.planner.methods import Method, find_method
from meshwright.planner.plan import Plan
from meshwright.planner.planner import plan_traced
from meshwright.runtime.microbatches import CannotCut, accumulated
from meshwright.runtime.processes import announce, enter, meet_to_measure, runs, shared_plan
from meshwright.runtime.spmd import Program, Strange, device_mesh, refuse_tracing
from meshwright.units import format_bytes, format_seconds

log = logging.getLogger("meshwright")


def parallelize(
    function: Callable[..., Any] | None = None,
    *,
    cluster: Cluster | str | None = None,
    mesh: Mesh | tuple[int, ...] | None = None,
    method: Method | str | None = None,
    microbatches: int = 1,
    donate_argnums: str | int | Sequence[int] = "auto",
    static_argnums: int | Sequence[int] = (),
    batch_argnums: int | Sequence[int] = (1,),
) -> Any:
    """Makes a single-device function run on many devices; to be called directly or as a decorator.

    The first call with arguments of some shapes plans and compiles; later ones go straight to the compiled program.

    Args:
        function: An ordinary JAX function, such as a train step from a state and a batch to a new state and metrics.
        cluster: What `mw.plan` takes; the local devices by default.
        mesh: One logical mesh, or its shape on the cluster, instead of all views of the cluster.
        method: A method or its short name, such as ``"zero3"``; `mw.Auto()` by default.
        microbatches: Into how many parts the batch is cut; the parts run one after the other and their gradients are
            added up, so that a step needs less memory. The numbers stay those of the whole batch, but for random bits
            drawn for each example: each part draws its own. Where they are not proven to stay (batch norm), the batch
            runs whole, and a warning and the plan's remarks say why.
        donate_argnums: Arguments whose memory the results may take over: they cannot be used after the call. By default
            those that come back whole as results, such as a state.
        static_argnums: Arguments that are not arrays but values the function is compiled for; they must be hashable.
        batch_argnums: Arguments whose leaves are examples stacked along their first dim.

    Returns:
        A `Parallelized` function.
    """
    if function is not None and not callable(function):
        raise ShardingError(f"parallelize was given {function!r:.60}; give a function, and options by name")
    if function is None:
        given = {k: v for k, v in locals().items() if k != "function"}
        return partial(parallelize, **given)
    return Parallelized(
        function,
        Settings(
            cluster=cluster,
            mesh=mesh,
            method=find_method(method),
            microbatches=microbatches,
            donate_argnums=None if donate_argnums == "auto" else _numbers("donate_argnums", donate_argnums, function),
            static_argnums=_numbers("static_argnums", static_argnums, function),
            batch_argnums=_numbers("batch_argnums", batch_argnums, None),
        ),
    )


@dataclass(frozen=True)
class Settings:
    """How a function is to be parallelised; see `parallelize`. ``donate_argnums`` is None for those that come back."""

    cluster: Cluster | str | None
    mesh: Mesh | tuple[int, ...] | None
    method: Method
    microbatches: int
    donate_argnums: tuple[int, ...] | None
    static_argnums: tuple[int, ...]
    batch_argnums: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.microbatches, int) or self.microbatches < 1:
            raise ShardingError(f"microbatches is {self.microbatches!r}; give a whole number, 1 or more")
        if self.method.staged:
            raise ShardingError(
                f"{self.method.name} plans a pipeline, which cannot be run yet: plan it with mw.plan, and run the "
                "function by a method without stages, such as mw.Auto()"
            )


class Parallelized:
    """A function that runs on many devices; made by `parallelize`.

    Attributes:
        settings: How it is parallelised.
        recent: The program that was called last; None before the first call.
    """

    __name__: str

    def __init__(self, function: Callable[..., Any], settings: Settings):
        self.__name__ = type(function).__name__  # of a callable that has no name of its own
        self.function = function
        self.settings = settings
        self.recent: Program | None = None
        self._programs: dict[Any, Program] = {}
        self._plans: dict[Any, Plan] = {}
        self._steps: dict[Any, Callable[..., Any]] = {}
        self._remarks: dict[Any, tuple[str, ...]] = {}
        self._arguments = _Arguments(function, settings.static_argnums)
        update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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
        self.recent = program = self._program(bound)
        runs(program)
        try:
            return program(*bound.values)
        except jax.errors.JaxRuntimeError as error:
            _explain(error, program.plan, bound.values)
            raise

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments: arrays or `jax.ShapeDtypeStruct`s. Made once for equal types.

        With several processes all of them must ask for it: the first one makes it, and the others take it over.
        """
        return self._plan(self._arguments.bind(args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """JAX's lowering for these arguments, as `jax.jit` has it."""
        bound = self._arguments.bind(args, kwargs)
        return self._program(bound).lower(*bound.values)

    def compiled(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled program for these arguments: `lower` and compile."""
        return self.lower(*args, **kwargs).compile()

    @property
    def state_argnum(self) -> int:
        """Position of the state among the arguments that are not static: the first one that is no batch."""
        free = [i for i in range(len(self.settings.batch_argnums) + 1) if i not in self.settings.batch_argnums]
        return sum(i not in self.settings.static_argnums for i in range(free[0]))

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans so far, the newest first."""
        return tuple(self._plans.values())[::-1]

    @property
    def last_plan(self) -> Plan | None:
        """The plan that was made or used last."""
        return self.recent.plan if self.recent is not None else next(reversed(self._plans.values()), None)

    def _program(self, bound: "_Bound") -> Program:
        key = bound.key()
        if key not in self._programs:
            plan = self._plan(bound)
            self._programs[key] = Program(plan, self._step(bound), device_mesh(plan))
        return self._programs[key]

    def _plan(self, bound: "_Bound") -> Plan:
        key = bound.key()
        if key not in self._plans:
            announce(f"the planning of {self.__name__}", bound.names, bound.values, is_next=True)
            before = self.last_plan
            started = time.perf_counter()
            traced = self._donating(trace(self._step(bound), *bound.values), bound)
            meet_to_measure(self.settings.cluster, self.settings.mesh)
            plan = shared_plan(self.__name__, traced, lambda: self._plan_traced(traced))
            plan = self._plans[key] = replace(plan, remarks=(*self._remarks.get(key, ()), *plan.remarks))
            seconds = format_seconds(time.perf_counter() - started)
            if before is not None:
                log.warning("%s: planned again in %s, since %s", self.__name__, seconds, _difference(before, plan))
        return self._plans[key]

    def _plan_traced(self, traced: Traced) -> Plan:
        return plan_traced(traced, self.settings.cluster, self.settings.mesh, self.settings.method)

    def _step(self, bound: "_Bound") -> Callable[..., Any]:
        """The function of the arguments that are not static, cut into microbatches where asked for and possible."""
        count = self.settings.microbatches
        if count == 1:
            return bound.function
        key = bound.key()
        if key not in self._steps:
            batch = [i for i, number in enumerate(bound.numbers) if number in self.settings.batch_argnums]
            try:
                cut = accumulated(bound.function, bound.values, batch, count)
                self._steps[key] = wraps(bound.function)(cut)  # its arguments keep their names in the plan
            except CannotCut as reason:
                remark = f"runs its batch whole instead of in {count} microbatches, which could change its numbers"
                log.warning("%s: %s: %s", self.__name__, remark, reason)
                self._steps[key] = bound.function
                self._remarks[key] = (f"The step {remark}: {reason}.",)
        return self._steps[key]

    def _donating(self, traced: Traced, bound: "_Bound") -> Traced:
        """The same with the arguments that are donated marked."""
        graph, owners = traced.graph, traced.call.arguments.owners
        names = dict(zip(bound.names, bound.numbers, strict=True))
        if self.settings.donate_argnums is None:
            returning = set(graph.state.values())
            stays = {owner for i, owner in enumerate(owners) if i not in returning}
            donated = frozenset(i for i, owner in enumerate(owners) if owner not in stays)
        else:
            donated = frozenset(i for i, owner in enumerate(owners) if names[owner] in self.settings.donate_argnums)
        return replace(traced, graph=replace(graph, donated=donated | graph.donated))


@dataclass(frozen=True)
class _Bound:
    """A call's arguments by position, without the static ones.

    Attributes:
        function: The function of `values` alone.
        values: The arguments that are not static.
        names: Their names.
        numbers: Their positions in the function's own signature.
        static: The static arguments.
    """

    function: Callable[..., Any]
    values: tuple[Any, ...]
    names: tuple[str, ...]
    numbers: tuple[int, ...]
    static: tuple[Any, ...]

    def key(self) -> Any:
        """Equal for calls that the same plan serves."""
        leaves, tree = tree_flatten(self.values)
        found = self.static, self.names, tree, tuple(map(_type, leaves))
        try:
            hash(found)
        except TypeError as error:
            raise ShardingError(
                f"what is no array in the arguments must be hashable, so that calls can be told apart: {error}; use a "
                "tuple or a frozen dataclass there, or close over it"
            ) from None
        return found


class _Arguments:
    """Brings the arguments of calls, however they are written, into the order of the function's parameters."""

    def __init__(self, function: Callable[..., Any], static: tuple[int, ...]):
        self.function = function
        self.static = frozenset(static)
        try:
            self.signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):  # builtins and the like: by position only
            self.signature = None
        self._functions: dict[Any, Callable[..., Any]] = {}

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Bound:
        if self.signature is not None:
            bound = self.signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        count = len(args) + len(kwargs)
        names = (*argument_names(self.function, len(args)), *kwargs)
        values = (*args, *kwargs.values())
        free = tuple(i for i in range(count) if i not in self.static)
        fixed = tuple((i, values[i]) for i in range(count) if i in self.static)
        for i, value in fixed:
            if not _is_hashable(value):
                raise ShardingError(
                    f"static argument {names[i]} is {value!r:.60}, which cannot be hashed; give a hashable value such "
                    "as a tuple, or do not list it in static_argnums"
                )
        key = (fixed, names)
        if key not in self._functions:
            self._functions[key] = self._make(len(args), names, free, dict(fixed))
        return _Bound(
            self._functions[key],
            tuple(values[i] for i in free),
            tuple(names[i] for i in free),
            free,
            tuple((i, type(value), value) for i, value in fixed),
        )

    def _make(
        self, num_args: int, names: tuple[str, ...], free: tuple[int, ...], fixed: dict[int, Any]
    ) -> Callable[..., Any]:
        """The function of its free arguments, all by position."""
        if not fixed and num_args == len(names):
            return self.function

        @wraps(self.function)
        def call(*values: Any) -> Any:
            full = fixed | dict(zip(free, values, strict=True))
            given = [full[i] for i in range(len(names))]
            return self.function(*given[:num_args], **dict(zip(names[num_args:], given[num_args:], strict=True)))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        named = [inspect.Parameter(names[i].replace("/", "_"), kind) for i in free]
        call.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        return call


def _numbers(name: str, given: int | str | Sequence[int], function: Callable[..., Any] | None) -> tuple[int, ...]:
    numbers = (given,) if isinstance(given, int) else given
    if isinstance(numbers, str) or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise ShardingError(f"{name} is {given!r}; give the positions of arguments, such as (0,)")
    found = tuple(numbers)
    if function is None:
        return found
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return found
    count = len(parameters)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return found
    for n in found:
        if not -count <= n < count:
            raise ShardingError(f"{name} names argument {n}; the function has {count}, numbered from 0")
    return tuple(n % count for n in found)


def _type(leaf: Any) -> Any:
    """What JAX would tell two leaves apart by; other leaves than arrays are told apart by themselves."""
    try:
        aval = jax_compat.abstract(leaf)
    except (TypeError, OverflowError):
        return leaf
    return aval.shape, aval.dtype, aval.weak_type, isinstance(leaf, bool | int | float | complex)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _difference(before: Plan, after: Plan) -> str:
    """What about the arguments changed from one plan to the next."""
    known = {t.path: t for t in before.arguments}
    for tensor in after.arguments:
        old = known.get(tensor.path)
        if old is None:
            return f"{tensor.path} is new"
        if (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
            return (
                f"{tensor.path} changed from {old.dtype}{list(old.shape)} to {tensor.dtype}{list(tensor.shape)}; "
                "pad to one shape to plan and compile once"
            )
    return (
        "its arguments have another structure or static value; what is no array in them must be equal from call to "
        "call: make an optimizer or activation function once, not with each state"
    )


def _explain(error: Exception, plan: Plan, args: Sequence[Any]) -> None:
    """Where memory ran out, raises an error that says what to do about it."""
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
