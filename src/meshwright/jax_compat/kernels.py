"""Private JAX of fused kernels: the devices that they ask for, where they run, and how a part of one is made.

The rules of its folder hold here: with `jax_devices.py`, it is all that touches private or unstable JAX.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from threading import Lock
from typing import Any

import jax
import jax.extend.backend
import numpy as np
from jax.extend import core as jex_core

from meshwright import jax_compat
from meshwright.jax_compat.versions import private

core = private("jax._src.core", "EvalTrace", "Jaxpr", "trace_state_clean")
conditionals = private("jax._src.lax.control_flow.conditionals", "platform_index_p")
cudnn_attention = private("jax._src.cudnn.fused_attention_stablehlo", "check_cudnn_version")
mlir = private("jax._src.interpreters.mlir", "_platform_specific_lowerings")
xla_bridge = private("jax._src.xla_bridge", "canonicalize_platform", "get_backend", "local_devices", "process_count")

# The client that code finds while it is traced; None for the devices at hand. It is part of the keys of JAX's
# caches, so that a function that was traced for other devices is traced again.
_imitated = jax.make_user_context(None)
# Names of the platform whose branches are traced; None traces all, as JAX does.
_chosen = jax.make_user_context(None)
# The newest version of cuDNN that JAX asks for anywhere, and the first compute capability that has fused attention.
_CUDNN_VERSION = 91100
_FUSED_ATTENTION = 8


@contextmanager
def imitating(client: Any) -> Iterator[None]:
    """A context in which code that is traced by this thread and asks JAX for its devices finds those of a client.

    Args:
        client: It has the properties and methods of a client that are asked for, and says by `answers` of which
            platforms; None for the devices at hand.
    """
    with _interception, _imitated(client):
        yield


@contextmanager
def choosing(platforms: tuple[str, ...]) -> Iterator[None]:
    """A context in which this thread traces `jax.lax.platform_dependent` as its branch for one of these platforms."""
    with _interception, _chosen(platforms):
        yield


def platform_at_hand() -> str:
    """The platform of the default devices, by the name that programs are compiled for: "cuda" or "rocm", not "gpu"."""
    return str(xla_bridge.canonicalize_platform(jax.default_backend()))


class _Interception:
    """Stands before JAX's look-ups of devices as long as some thread traces for other devices than those at hand.

    JAX has no parameter for them: it asks these functions. They are the process's, and what they answer is each
    thread's: without a client of its own in context, a thread gets the answers of the functions that were replaced.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_contexts = 0
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # owner, name, the original, what stands in its place

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_contexts:
                self._replace()
            self._num_contexts += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_contexts -= 1
            if not self._num_contexts:
                self._restore()

    def _replace(self) -> None:
        get_backend, local_devices = _backend_lookup(xla_bridge.get_backend), _uncached(xla_bridge.local_devices)
        process_count, primitive = _uncached(xla_bridge.process_count), conditionals.platform_index_p
        for owner, name, instead in (
            (xla_bridge, "get_backend", get_backend),
            (jax.extend.backend, "get_backend", get_backend),
            (xla_bridge, "local_devices", local_devices),
            (jax, "local_devices", local_devices),
            (xla_bridge, "process_count", process_count),
            (jax, "process_count", process_count),
            (cudnn_attention, "check_cudnn_version", _version_lookup(cudnn_attention.check_cudnn_version)),
            (primitive, "bind", _branch_choice(primitive.bind)),
        ):
            self._replaced.append((owner, name, vars(owner).get(name), instead))
            setattr(owner, name, instead)

    def _restore(self) -> None:
        while self._replaced:
            owner, name, original, instead = self._replaced.pop()
            if vars(owner).get(name) is not instead:  # whoever replaced ours meanwhile calls it, and it still answers
                continue
            if original is None:  # a primitive has `bind` of its class
                delattr(owner, name)
            else:
                setattr(owner, name, original)


_interception = _Interception()


def _imitated_client() -> Any:
    """The client that this thread's code finds; values computed while a function is traced are on real devices."""
    return None if _is_computing() else _imitated.value


def _backend_lookup(get_backend: Callable[..., Any]) -> Callable[..., Any]:
    def answer(platform: Any = None) -> Any:
        client = _imitated_client()
        return get_backend(platform) if client is None or not client.answers(platform) else client

    return _like(get_backend, answer)


def _version_lookup(cudnn_version: Callable[[], int]) -> Callable[[], int]:
    def answer() -> int:
        client = _imitated_client()
        if client is None:
            return cudnn_version()
        if not client.answers("cuda"):
            raise RuntimeError("cuDNN is not detected.")  # as JAX says it on such a machine
        capability = str(getattr(client.devices()[0], "compute_capability", ""))
        if capability and int(capability.partition(".")[0]) < _FUSED_ATTENTION:
            raise RuntimeError(
                f"cuDNN has fused attention from compute capability {_FUSED_ATTENTION}.0 on, "
                f"and this chip has {capability}"
            )
        return _CUDNN_VERSION

    return _like(cudnn_version, answer)


def _branch_choice(bind: Callable[..., Any]) -> Callable[..., Any]:
    """The branch of `jax.lax.platform_dependent`; that for all other platforms has no platforms of its own."""

    def answer(*, platforms: Any) -> np.int32 | jax.Array:
        chosen = _chosen.value
        if chosen is None or _is_computing():
            return bind(platforms=platforms)
        for index, names in enumerate(platforms):
            if names is None or set(names) & set(chosen):
                return np.int32(index)
        branches = ", ".join(name for names in platforms for name in names)
        raise NotImplementedError(f"jax.lax.platform_dependent has branches for {branches}, but not for {chosen[-1]}")

    return _like(bind, answer)


def _uncached(lookup: Callable[..., Any]) -> Callable[..., Any]:
    """A function of JAX that keeps its answers, which must not be those about a client."""
    inner = getattr(lookup, "__wrapped__", lookup)

    def answer(*args: Any, **kwargs: Any) -> Any:
        return (lookup if _imitated_client() is None else inner)(*args, **kwargs)

    return _like(lookup, answer)


def _like(original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in an original's place, with its name and, where it keeps answers, the functions that forget them."""
    for name in ("cache_clear", "cache_info"):
        if hasattr(original, name):
            setattr(instead, name, getattr(original, name))
    return wraps(original)(instead)


def _is_computing() -> bool:
    """Whether values are computed now, as under `jax.ensure_compile_time_eval`, and not traced."""
    context = getattr(core, "trace_ctx", None)
    return core.trace_state_clean() if context is None else isinstance(context.trace, core.EvalTrace)


def kernel_params(eqn: Any, grid: Sequence[Any], shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The parameters of a Pallas kernel with another grid, for other shapes of its inputs and results."""
    mapping, estimate = eqn.params["grid_mapping"], eqn.params.get("cost_estimate")
    pairs = zip(mapping.block_mappings, shapes, strict=True)
    arrays = tuple(array.replace(array_aval=array.array_aval.update(shape=tuple(shape))) for array, shape in pairs)
    made = zip(eqn.params["out_avals"], shapes[mapping.num_inputs :], strict=True)
    changed = {
        "grid_mapping": mapping.replace(grid=tuple(grid), block_mappings=arrays),
        "out_avals": tuple(aval.update(shape=tuple(shape)) for aval, shape in made),
    }
    if estimate is not None:
        share = np.prod(grid, dtype=float) / np.prod(mapping.grid, dtype=float)
        parts = {name: int(amount * share) for name, amount in vars(estimate).items()}
        changed["cost_estimate"] = replace(estimate, **parts)
    return eqn.params | changed


def params_without_mesh(eqn: Any) -> dict[str, Any]:
    """The parameters of a Pallas kernel, of which no equation has a mesh in context: devices run it on their own."""
    mapping = eqn.params["grid_mapping"]
    arrays = tuple(
        array.replace(index_map_jaxpr=_without_mesh(array.index_map_jaxpr)) for array in mapping.block_mappings
    )
    body = _without_mesh(eqn.params["jaxpr"])
    return eqn.params | {"jaxpr": body, "grid_mapping": mapping.replace(block_mappings=arrays)}


def _without_mesh(value: Any) -> Any:
    """A parameter of an equation, with the equations of all jaxprs in it."""
    if isinstance(value, tuple | list):
        return type(value)(map(_without_mesh, value)) if type(value) in (tuple, list) else value
    if not isinstance(value, core.Jaxpr):
        return value.replace(jaxpr=_without_mesh(value.jaxpr)) if isinstance(value, jax_compat.ClosedJaxpr) else value
    equations = [
        eqn.replace(
            invars=list(map(_literal_without_mesh, eqn.invars)),
            ctx=jax_compat.context_without_mesh(eqn.ctx),
            params={name: _without_mesh(inner) for name, inner in eqn.params.items()},
        )
        for eqn in value.eqns
    ]
    return value.replace(eqns=equations)


def _literal_without_mesh(operand: Any) -> jex_core.Var | jex_core.Literal:
    """An operand; a copy of a literal takes its type, which names a mesh, from where it is used."""
    is_array = isinstance(operand, jax_compat.Literal) and isinstance(operand.val, np.ndarray)
    return jax_compat.Literal(operand.val.copy(), operand.aval) if is_array else operand


def has_kernel(eqn: Any, platform: str) -> bool:
    """Whether a platform can run a fused kernel."""
    if eqn.primitive.name == "pallas_call":
        return platform != "cpu" or bool(eqn.params["interpret"])
    inner = eqn.primitive.name.removesuffix("_wrapper")
    lowerings = mlir._platform_specific_lowerings.get(platform, ())
    return platform in ("cuda", "gpu") or any(primitive.name == inner for primitive in lowerings)
