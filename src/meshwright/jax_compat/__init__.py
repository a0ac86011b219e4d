"""Private or unstable JAX of programs and arrays: what differs in 0.10 to 0.12 is hidden here.

Only this folder and `jax_devices.py` touch private JAX.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from inspect import signature
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from meshwright.jax_compat.versions import private, warn_of_newer

core = private("jax._src.core", "JaxprEqnContext", "Var", "trace_state_clean")
debugging = private("jax._src.debugging", "OrderedDebugEffect")
partial_eval = private("jax.interpreters.partial_eval", "dce_jaxpr", "dce_rules")
source_info_util = private(
    "jax._src.source_info_util", "current_name_stack", "new_name_stack", "summarize", "user_context"
)
warn_of_newer()

Literal = jex_core.Literal
Jaxpr = jex_core.Jaxpr
ClosedJaxpr = jex_core.ClosedJaxpr
Equation = jex_core.JaxprEqn

# Primitives that only call another jaxpr on their operands, and the parameter that holds it. The names are unstable:
# both spellings of each are kept.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # what older releases call closed_call
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "remat": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
CHECKPOINTS = frozenset({"remat2", "remat", "checkpoint"})
#: The primitives whose equations may run jaxprs that a program looks into.
RUN_JAXPRS = frozenset({*_CALLS, "custom_linear_solve", "scan", "while", "cond"})
_RECOMPUTED = "rematted_computation"
HOST_MEMORY = "pinned_host"  # what XLA calls the host's memory that devices read and write directly
# From 0.12 on, a rule also takes which operands that are references may be read later.
_HAS_LIVE_INPUTS = "live_inputs" in signature(partial_eval.dce_jaxpr).parameters


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """The type of an array or number. Only scalars stay weakly typed: so a plan and its run trace the same program."""
    leaf = getattr(leaf, "array_type", leaf)  # of a pipeline's stacks, which are not JAX's own arrays
    aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    weak = bool(getattr(aval, "weak_type", False)) and not aval.shape
    return _struct(tuple(aval.shape), aval.dtype, weak)


@lru_cache(maxsize=4096)
def _struct(shape: tuple[int, ...], dtype: Any, weak: bool) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)


def trace(function: Callable[..., Any], args: Sequence[Any]) -> jex_core.ClosedJaxpr:
    """Traces ``function(*args)`` and returns its closed jaxpr."""
    return jax.make_jaxpr(function)(*args)


def abstract_mesh(
    sizes: Sequence[int], names: Sequence[str], explicit: Sequence[str] = (), devices: Any = None
) -> jax.sharding.AbstractMesh:
    """A mesh without devices; the axes are of JAX's automatic type unless they are named as explicit.

    It names the kind of some devices (of a mesh, by default the local ones): JAX does not mix it with a mesh of other
    devices, and the user may have made one of the local ones.
    """
    kinds = jax.sharding.AxisType
    types = tuple(kinds.Explicit if name in explicit else kinds.Auto for name in names)
    like = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("all",)) if devices is None else devices
    device = like.abstract_mesh.abstract_device
    return jax.sharding.AbstractMesh(tuple(sizes), tuple(names), axis_types=types, abstract_device=device)


def in_mesh(mesh: Any | None) -> AbstractContextManager:
    """A context in which an abstract mesh is JAX's mesh in context; None changes nothing."""
    return nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


@lru_cache(maxsize=256)
def context_without_mesh(context: Any) -> Any:
    """The context of an equation without the mesh that was JAX's mesh in context when it was traced."""
    with context.manager, jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return core.JaxprEqnContext()


def is_tracing() -> bool:
    """Whether JAX is tracing some function around the caller."""
    return not core.trace_state_clean()


def called_jaxpr(eqn: Any) -> Any | None:
    """The closed jaxpr that a call-like equation runs on its `call_operands`, or None for any other equation."""
    if eqn.primitive.name == "custom_linear_solve":
        return close(eqn.params["jaxprs"].solve)
    key = _CALLS.get(eqn.primitive.name)
    if key is None:
        return None
    inner = eqn.params.get(key) or eqn.params.get("call_jaxpr") or eqn.params.get("jaxpr")
    closed = close(inner) if inner is not None else None
    return closed if closed is not None and len(closed.jaxpr.invars) == len(eqn.invars) else None


def call_operands(eqn: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Those of a call-like equation's operands that its jaxpr takes."""
    if eqn.primitive.name != "custom_linear_solve":
        return tuple(operands)
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    right_hand_sides = operands[first + lengths.solve + lengths.transpose_solve :]
    return (*operands[first : first + lengths.solve], *right_hand_sides)


def close(jaxpr: Any) -> jex_core.ClosedJaxpr:
    """A closed jaxpr, whether it was open or closed."""
    return jaxpr if hasattr(jaxpr, "jaxpr") else ClosedJaxpr(jaxpr, ())


def variable(aval: Any) -> jex_core.Var:
    """A new variable of a jaxpr."""
    return core.Var(aval)


def is_literal(value: Any, aval: Any) -> bool:
    """Whether a constant may stand in an equation as it is: one number, and no random key."""
    return not aval.shape and not is_key_dtype(aval.dtype) and not isinstance(value, jax.Array)


def with_operands(eqn: Any, operands: Sequence[Any], results: Sequence[Any], stack: Sequence[Any] = ()) -> Equation:
    """An equation on other variables, with the name stacks of calls around it, which were inlined."""
    names = source_info_util.new_name_stack()
    for around in (*stack, name_stack(eqn)):
        names = names + around
    return eqn.replace(
        invars=list(operands), outvars=list(results), source_info=eqn.source_info.replace(name_stack=names)
    )


@lru_cache(maxsize=1)
def _backward_checkpoint() -> Any:
    """The equation of the backward pass of some function with a checkpoint."""
    backward = jax.make_jaxpr(jax.grad(jax.checkpoint(lambda x: x * x * x)))(1.0)
    return next(eqn for eqn in backward.jaxpr.eqns if eqn.primitive.name in CHECKPOINTS)


def backward_checkpoint(first: Any, prevent_cse: bool) -> Equation:
    """A checkpoint of a backward pass, like which others are made.

    Args:
        first: The equation that it is to run first, whose source is taken for that of all.
        prevent_cse: Whether the compiler must be kept from merging it with the forward pass.
    """
    eqn = _backward_checkpoint()
    names = source_info_util.new_name_stack("transpose(jvp())")
    return eqn.replace(
        params={**eqn.params, "prevent_cse": prevent_cse}, source_info=first.source_info.replace(name_stack=names)
    )


def is_on_host(aval: Any) -> bool:
    """Whether values of a type are in the memory of the host, rather than in that of the devices."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def host_copies(aval: Any, like: Any) -> tuple[Equation, Equation]:
    """The equations that copy a value to the host's memory and back from there, named as another equation is.

    Args:
        aval: The type of the value on the device.
        like: The other equation.
    """
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    found = []
    for place, kind in ((host, aval), (device, aval.update(memory_space=host))):
        copy = jax.make_jaxpr(lambda value, place=place: jax.device_put(value, place, may_alias=False))(kind)
        found.append(copy.jaxpr.eqns[0].replace(source_info=like.source_info))
    return found[0], found[1]


def as_recomputed(eqn: Any, stack: Sequence[Any]) -> Equation:
    """An equation under the names of what a checkpoint computes again."""
    names = source_info_util.new_name_stack(_RECOMPUTED)
    for around in (*stack, name_stack(eqn)):
        names = names + around
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=names))


def as_first(eqn: Any) -> Equation:
    """An equation of a checkpoint without the name of what it computes again."""
    names: Any = name_stack(eqn)
    kept = tuple(one for one in names.stack if getattr(one, "name", "") != _RECOMPUTED)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=type(names)(kept)))


def on_types(eqn: Any, avals: Sequence[Any], params: Any) -> Equation:
    """An equation with other parameters on operands of other types, with the types of its results."""
    fits = (
        v.aval.shape == aval.shape and v.aval.dtype == aval.dtype for v, aval in zip(eqn.invars, avals, strict=True)
    )
    if params is eqn.params and all(fits):
        same: Equation = eqn
        return same
    with eqn.ctx.manager:
        found, _ = eqn.primitive.abstract_eval(*avals, **params)
    made = found if eqn.primitive.multiple_results else [found]
    pairs = zip(eqn.invars, avals, strict=True)
    operands = [v if isinstance(v, Literal) and v.aval == aval else variable(aval) for v, aval in pairs]
    return eqn.replace(params=dict(params), invars=operands, outvars=list(map(variable, made)))


def with_bodies(eqn: Any, bodies: Sequence[ClosedJaxpr]) -> Equation:
    """The equation of a conditional or a checkpoint that runs other jaxprs, with the operands that these take."""
    operands, results = (list(map(variable, avals)) for avals in (bodies[0].in_avals, bodies[0].out_avals))
    if "branches" in eqn.params:
        kept = {"branches": tuple(bodies)}
        return eqn.replace(params=eqn.params | kept, invars=[eqn.invars[0], *operands], outvars=results)
    key = _CALLS[eqn.primitive.name]
    inner = bodies[0] if isinstance(eqn.params[key], ClosedJaxpr) else bodies[0].jaxpr
    return eqn.replace(params={**eqn.params, key: inner}, invars=operands, outvars=results)


# Stands for the body of a loop while JAX makes the loop's parameters, which differ between its releases.
_trip = jex_core.Primitive("trip")
_trip.multiple_results = True
_trip.def_abstract_eval(lambda *_, results: list(results))


def scan_of(eqn: Any, body: ClosedJaxpr, counts: tuple[int, int]) -> Equation:
    """A scan like another one, with another body, whose operands and results are in the order of those of the body.

    Args:
        eqn: The equation of the other scan.
        body: The closed jaxpr of the body, without constants.
        counts: How many of its operands are the same for all trips, and how many are carried.
    """
    first, second = counts[0], sum(counts)
    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll") if name in eqn.params}
    carried, returned = body.in_avals[first:second], body.out_avals[counts[1] :]

    def scan(consts: list[Any], carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            made = _trip.bind(*consts, *carry, *x, results=(*carried, *returned))
            return made[: counts[1]], made[counts[1] :]

        carry, stacked = jax.lax.scan(step, carry, xs, **options)
        return carry, stacked

    stacks = [aval.update(shape=(options["length"], *aval.shape)) for aval in body.in_avals[second:]]
    kinds = [
        t if is_on_host(t) else jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=getattr(t, "weak_type", False))
        for t in (*body.in_avals[:second], *stacks)
    ]
    with eqn.ctx.manager:
        closed = jax.make_jaxpr(scan)(kinds[:first], kinds[first:second], kinds[second:])
    (found,) = closed.jaxpr.eqns
    assert list(found.invars) == list(closed.jaxpr.invars), "JAX has reordered the operands of a loop"
    return found.replace(params={**found.params, "jaxpr": body}, source_info=eqn.source_info, ctx=eqn.ctx)


def empty_loop(scope: str, length: int) -> Equation:
    """A scan of so many trips that computes nothing, in a name scope: `scan_of` makes others like it."""

    def loop() -> None:
        with jax.named_scope(scope):
            jax.lax.scan(lambda carry, _: (carry, None), (), None, length=length)

    (found,) = jax.make_jaxpr(loop)().jaxpr.eqns
    return found


def inner_jaxprs(eqn: Any) -> list[Any]:
    """All jaxprs among an equation's parameters, open."""
    found = []
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, Jaxpr | ClosedJaxpr):
                found.append(getattr(each, "jaxpr", each))
    return found


def trimmed(eqn: Any, used: Sequence[bool]) -> tuple[Sequence[bool], Any]:
    """An equation that computes only some of its results, with the operands that they need; a loop may need fewer."""
    rule: Any = None if all(used) else partial_eval.dce_rules.get(eqn.primitive)
    live = ([True] * len(eqn.invars),) if _HAS_LIVE_INPUTS else ()
    found: Any = (None, None) if rule is None else rule(list(used), *live, eqn)
    return ([True] * len(eqn.invars), eqn) if found[1] is None else found


def donated(eqn: Any) -> tuple[bool, ...]:
    """Which operands of a `jax.jit` call are donated."""
    return tuple(eqn.params.get("donated_invars", ()))


def has_shardings(eqn: Any) -> bool:
    """Whether a `jax.jit` call was given shardings of its operands or results."""
    given = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(hasattr(sharding, "spec") for sharding in given)


def name_stack(eqn: Any) -> Hashable:
    """The equation's name stack: hashable, and text by `str`."""
    return eqn.source_info.name_stack


def is_recomputed(scope: str) -> bool:
    """Whether a scope is in the recomputed part of a checkpoint."""
    return _RECOMPUTED in scope


def source_line(eqn: Any) -> str:
    """Where the user wrote the equation, as ``file:line (function)``; empty where JAX does not know."""
    return source_info_util.summarize(eqn.source_info)


def prints_in_order(eqn: Any) -> bool:
    """Whether an equation is `jax.debug.print` or `jax.debug.callback` with `ordered=True`."""
    return any(isinstance(effect, debugging.OrderedDebugEffect) for effect in eqn.effects)


def at_source(eqn: Any) -> AbstractContextManager:
    """A context in which whatever is traced is said to come from where the user wrote the equation."""
    return source_info_util.user_context(eqn.source_info.traceback)


def is_key_dtype(dtype: Any) -> bool:
    """Whether a dtype is that of typed random keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def itemsize(dtype: Any) -> int:
    """Bytes of one element; a typed key takes its implementation's words."""
    if is_key_dtype(dtype):
        return 8
    return dtype.itemsize


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many its carry."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].update(tuple(eqn.invars)).unpack()  # JAX 0.11 keeps three trees instead
    return len(list(consts)), len(list(carry))


def scan_length(eqn: Any, length: int) -> dict[str, Any]:
    """The parameters of a scan over fewer trips."""
    return {**eqn.params, "length": length, "unroll": min(eqn.params["unroll"], length)}


def bind(eqn: Any, operands: Sequence[Any], stack: Sequence[Any] = ()) -> list[Any]:
    """Runs one equation on its operands, as JAX's own interpreter would.

    Args:
        eqn: The equation.
        operands: Its operands.
        stack: Name stacks of the calls around it, which were inlined.
    """
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Older releases answer with the functions to call beside the parameters.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with in_place_of(eqn, stack):
        results = eqn.primitive.bind(*functions, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


@contextmanager
def in_place_of(eqn: Any, stack: Sequence[Any] = ()) -> Iterator[None]:
    """A context in which whatever is traced has the names and the source of an equation inside of inlined calls."""
    names = source_info_util.current_name_stack()
    for around in (*stack, name_stack(eqn)):
        names = names + around
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        yield


def key_shape(dtype: Any) -> tuple[int, ...]:
    """The shape of the bits of one typed random key."""
    return tuple(dtype._impl.key_shape)


def keys_of_bits(bits: Any, dtype: Any) -> jax.Array:
    """Typed random keys of some dtype, made of their bits: the inverse of `jax.random.key_data`."""
    return jax.random.wrap_key_data(bits, impl=dtype._impl)
