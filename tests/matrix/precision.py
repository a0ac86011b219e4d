"""Precisions as libraries write them: what holds parameters, what products compute in, and how they are made."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
from jax import lax

GRADIENT_SCALE = 1024.0  # brings gradients of a mean into the range of float8_e5m2
RANK = 2  # of what LoRA adds to a frozen matrix


@dataclass(frozen=True)
class Precision:
    """How a program holds and computes its numbers.

    Attributes:
        params: The dtype of parameters.
        compute: The dtype that they are cast to for the computation.
        kind: Empty, or ``"fp8"`` or ``"lora"`` for dense layers of that kind.
        is_scaled: Whether the loss is scaled, so that gradients do not underflow.
        rounding: By how much two right results may round one number of the computation differently, relatively: the
            unit roundoff of the computation. Of numbers that are cast to float8 only those near a tie round
            differently; a change by 2⁻¹⁰ makes about one in a hundred do so.
    """

    params: Any = jnp.float32
    compute: Any = jnp.float32
    kind: str = ""
    is_scaled: bool = False

    @property
    def rounding(self) -> float:
        return 2.0**-10 if self.kind == "fp8" else float(ml_dtypes.finfo(self.compute).eps) / 2

    def cast(self, tree: Any) -> Any:
        """A tree whose floats are in the dtype of the computation."""
        return jax.tree.map(lambda x: x.astype(self.compute) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


OF = {
    "float32": Precision(),
    "bf16 parameters": Precision(jnp.bfloat16, jnp.bfloat16),
    "bf16 compute": Precision(compute=jnp.bfloat16),
    "float16 scaled": Precision(compute=jnp.float16, is_scaled=True),
    "fp8 products": Precision(kind="fp8"),
    "int8 with LoRA": Precision(kind="lora"),
}


@jax.custom_vjp
def fp8_dot(x: Any, w: Any) -> Any:
    """A product whose operands, and the gradients that come back, are in float8."""
    return _fp8_forward(x, w)[0]


def _product(a: Any, b: Any, contract: Any) -> Any:
    return lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)


def _fp8_forward(x: Any, w: Any) -> Any:
    x, w = x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn)
    return _product(x, w, ((x.ndim - 1,), (0,))), (x, w)


def _fp8_backward(saved: Any, g: Any) -> Any:
    x, w = saved
    g = (g * GRADIENT_SCALE).astype(jnp.float8_e5m2)
    rows = tuple(range(x.ndim - 1))
    dx = _product(g, w, ((g.ndim - 1,), (1,)))
    return dx / GRADIENT_SCALE, _product(x, g, (rows, rows)) / GRADIENT_SCALE


fp8_dot.defvjp(_fp8_forward, _fp8_backward)


def fp8_dot_general(x: Any, w: Any, dimension_numbers: Any, **_: Any) -> Any:
    """`fp8_dot` as dense layers of Flax call it."""
    assert dimension_numbers == (((x.ndim - 1,), (0,)), ((), ()))
    return fp8_dot(x, w)


def quantized(w: Any) -> tuple[Any, Any]:
    """A matrix in int8, and a scale for each column."""
    scale = jnp.max(jnp.abs(w), axis=0) / 127
    return jnp.round(w / scale).astype(jnp.int8), scale


def lora_dot(x: Any, q: Any, scale: Any, a: Any, b: Any) -> Any:
    """A product with a frozen matrix in int8 and a trained one of low rank."""
    return x @ (q.astype(x.dtype) * lax.stop_gradient(scale).astype(x.dtype)) + (x @ a) @ b
