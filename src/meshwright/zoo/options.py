"""Names of the options that models share; no JAX, so that the command can list them."""

from fractions import Fraction

#: What the backward pass recomputes: nothing; everything but products with weights and fused attention; the same with
#: every second product (torchtitan's selective); whole layers.
CHECKPOINTS = ("none", "selective", "alternate", "full")

#: One fused kernel that never stores the scores, or the scores written out.
ATTENTION = ("fused", "plain")

#: Types that activations may have; weights are float32.
DTYPES = ("bfloat16", "float16", "float32", "float64")


def checkpoint_parts(checkpoint: str) -> tuple[str, Fraction]:
    """What a checkpointed layer recomputes, and the part of the layers that are checkpointed.

    >>> checkpoint_parts("full:2/3")
    ('full', Fraction(2, 3))

    Raises:
        ValueError: It names no part of the layers.
    """
    kind, colon, text = checkpoint.partition(":")
    try:
        share = Fraction(text if colon else 1)
    except ZeroDivisionError:
        share = Fraction(0)
    if not 0 < share <= 1:
        raise ValueError(f"{text} is not above 0 and at most 1")
    return kind, share
