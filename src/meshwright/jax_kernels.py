"""Private JAX of fused kernels: the devices that they ask for, where they run, and how a part of one is made.

With `jax_compat.py`, whose rules hold here, the only file that touches private or unstable JAX.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import jax
import jax.extend.backend
import numpy as np

from meshwright import jax_compat
from meshwright.jax_versions import private

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


def imitating(client: Any) -> Any:
    """A context in which code that is traced and asks JAX for its devices finds those of a client.

    Args:
        client: It has the properties and methods of a client that are asked for, and says by `answers` of which
            platforms.
    """
    _intercept()
    return _imitated(client)


def choosing(platforms: tuple[str, ...]) -> Any:
    """A context in which `jax.lax.platform_dependent` is traced as its branch for one of these names of a platform."""
    _intercept()
    return _chosen(platforms)


def platform_at_hand() -> str:
    """The platform of the default devices, by the name that programs are compiled for: "cuda" or "rocm", not "gpu"."""
    return str(xla_bridge.canonicalize_platform(jax.default_backend()))


@cache
def _intercept() -> None:
    """Puts the client before JAX's own look-ups: whoever asks for devices comes to one of these."""
    get_backend, cudnn_version = xla_bridge.get_backend, cudnn_attention.check_cudnn_version
    platform_index = conditionals.platform_index_p.bind

    def imitated() -> Any:
        """The client that is found; values that are computed while a function is traced are on real devices."""
        return None if _is_computing() else _imitated.value

    def found_backend(platform: Any = None) -> Any:
        client = imitated()
        return get_backend(platform) if client is None or not client.answers(platform) else client

    def found_version() -> int:
        client = imitated()
        if client is None or not client.answers("cuda"):
            return cudnn_version()
        capability = str(getattr(client.devices()[0], "compute_capability", ""))
        if capability and int(capability.partition(".")[0]) < _FUSED_ATTENTION:
            raise RuntimeError(
                f"cuDNN has fused attention from compute capability {_FUSED_ATTENTION}.0 on, "
                f"and this chip has {capability}"
            )
        return _CUDNN_VERSION

    def found_index(*, platforms: Any) -> Any:
        """The branch of `jax.lax.platform_dependent`; that for all other platforms has no platforms of its own."""
        chosen = _chosen.value
        if chosen is None or _is_computing():
            return platform_index(platforms=platforms)
        for index, names in enumerate(platforms):
            if names is None or set(names) & set(chosen):
                return np.int32(index)
        known = ", ".join(name for names in platforms for name in names)
        raise NotImplementedError(f"jax.lax.platform_dependent has branches for {known}, but not for {chosen[-1]}")

    def asked_afresh(kept: Any) -> Any:
        """A function of JAX that keeps its answers, which must not be those about a client."""
        inner = getattr(kept, "__wrapped__", kept)
        return wraps(kept)(lambda *args, **kwargs: (kept if imitated() is None else inner)(*args, **kwargs))

    conditionals.platform_index_p.bind = found_index
    xla_bridge.get_backend, cudnn_attention.check_cudnn_version = found_backend, found_version
    jax.extend.backend.get_backend = found_backend
    jax.local_devices = xla_bridge.local_devices = asked_afresh(xla_bridge.local_devices)
    jax.process_count = xla_bridge.process_count = asked_afresh(xla_bridge.process_count)


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


def _literal_without_mesh(operand: Any) -> Any:
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
