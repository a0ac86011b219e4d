"""Splash attention, JAX's fused kernel for TPUs, for a group of query heads that shares one head of keys."""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash

_BLOCKS = (512, 256, 128)  # tokens of a block, the largest that divides the sequence


@cache
def splash_kernel(
    seq: int,
    group: int,
    causal: bool,
    window: int | None,
    cap: float | None = None,
    name: str | None = None,
    interpret: bool = False,
) -> Callable[..., jax.Array]:
    """The kernel, `kernel(q, k, v, sinks=None)`; all layers share one, so that its masks are computed once.

    Args:
        seq: Number of tokens.
        group: How many heads of queries share a head of keys and values.
        causal: Whether a position may look only at itself and at earlier ones.
        window: With `causal`, how many positions, its own included, each one looks at; None for all.
        cap: What scores are bent to stay below; None for no cap.
        name: What a checkpoint's policy knows the results by.
        interpret: Whether it runs as ordinary operations, which any device can.
    """
    left = None if not causal or window is None else window - 1
    mask = _Band((seq, seq), (left, 0), 0) if causal else splash.FullMask((seq, seq))
    block = next(size for size in _BLOCKS if seq % size == 0)
    sizes: dict[str, Any] = {f"block_{side}{part}": block for part in ("", "_dkv", "_dq") for side in ("q", "kv")}
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mqa_single_device(
            splash.MultiHeadMask([mask] * group),
            block_sizes=splash.BlockSizes(**sizes),
            residual_checkpoint_name=name,
            attn_logits_soft_cap=cap,
            interpret=interpret,
        )


class _Band(splash.LocalMask):
    """A causal mask or a window; blocks that lie within or outside of it are not compared position by position."""

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = (range(size)[part] for size, part in zip(self.shape, index, strict=True))
        left = self.shape[0] if self.window_size[0] is None else self.window_size[0]
        if columns[-1] <= rows[0] and columns[0] >= rows[-1] - left:
            return _filled(True, len(rows), len(columns))
        if columns[0] > rows[-1] or columns[-1] < rows[0] - left:
            return _filled(False, len(rows), len(columns))
        return super().__getitem__(index)


@lru_cache(maxsize=8)
def _filled(value: bool, rows: int, columns: int) -> np.ndarray:
    return np.full((rows, columns), value)
