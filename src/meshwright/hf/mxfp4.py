"""Numbers of four bits in blocks with a common scale, as the released GPT-OSS has its experts.

The format is MXFP4 of the Open Compute Project (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-
spec-final-pdf): 32 numbers, each a sign, two bits of exponent and one of mantissa, share a power of two. A byte has two
of them, the first in its lower half.
"""

import ml_dtypes
import numpy as np

BLOCK = 32  # numbers that share a scale
_BIAS = 127  # of the exponents of scales
_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_NUMBERS = np.array([*_POSITIVE, *(-number for number in _POSITIVE)], np.float32)
# Of each byte its lower half first; a pair is one element, which NumPy looks up five times as quickly as a row of two.
_PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=1).view(np.uint64)[:, 0]


def decoded(blocks: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """The numbers of blocks, in bfloat16, which holds all of them exactly.

    Args:
        blocks: Bytes, (…, blocks of the last dim, 16).
        exponents: Of the scales, (…, blocks of the last dim).

    >>> decoded(np.full((1, 16), 0x21, np.uint8), np.array([128], np.uint8))[:4].tolist()
    [1.0, 2.0, 1.0, 2.0]
    """
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)
    numbers = _PAIRS[blocks].view(np.float32).reshape(*exponents.shape, BLOCK) * scales[..., None]
    return numbers.reshape(*exponents.shape[:-1], -1).astype(ml_dtypes.bfloat16)
