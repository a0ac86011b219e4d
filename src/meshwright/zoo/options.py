"""Names of the options that models share; no JAX, so that the command can list them."""

#: What the backward pass recomputes: nothing; everything but products with weights and fused attention; the same with
#: every second product (torchtitan's selective); whole layers.
CHECKPOINTS = ("none", "selective", "alternate", "full")

#: One fused kernel that never stores the scores, or the scores written out.
ATTENTION = ("fused", "plain")

#: Types that activations may have; weights are float32.
DTYPES = ("bfloat16", "float16", "float32", "float64")
