"""The Pallas kernels that JAX ships; from 0.11 on it warns on import that others are to replace some of them."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import attention, decode_attention, rms_norm, softmax
    from jax.experimental.pallas.ops.tpu import flash_attention
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

__all__ = [
    "attention",
    "decode_attention",
    "flash_attention",
    "rms_norm",
    "softmax",
    "splash_attention_kernel",
    "splash_attention_mask",
]
