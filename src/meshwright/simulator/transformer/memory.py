"""Memory of a recipe on one device: state, activations of each layer, temporaries."""

from meshwright.cost.attention import MATERIALISED
from meshwright.simulator.transformer.recipe import Recipe

#: Bytes per logit at the worst moment: with their gradients in 16 bits; in single precision; and with what eager
#: kernels keep beside (exponentials, two gradients).
_LOGIT_BYTES = {"fused": 4.0, "in place": 8.0, "separate": 14.0}


def kept_bytes(recipe: Recipe) -> dict[str, float]:
    """Bytes of the tensors that one layer's backward pass reads, by name."""
    s, stack, t = recipe.shape, recipe.stack, recipe.tensor
    spread, tokens = 2.0 * recipe.spread_tokens * s.hidden, 2.0 * recipe.tokens
    inner = tokens * s.active * s.ffn / t
    kept = {
        "input": spread,
        "norm": 2 * spread,  # both norms' results, which products read
        "middle": spread,
        "query": tokens * s.query_width / t,
        "key": tokens * s.kv_width / t,
        "value": tokens * s.kv_width / t,
        "attention": tokens * s.query_width / t,
        "up": inner,
        "activation": inner,
    }
    if s.gated:
        kept["gate"] = inner
        if not stack.fused:
            kept["norm"] *= 2  # the widened input as well
            kept["activation"] += inner
    if stack.dropout:
        kept["masks"] = spread  # one byte for each of two
    if stack.attention == MATERIALISED:
        scores = recipe.microbatch * s.heads / t * float(s.seq) ** 2 / recipe.context
        kept["scores"] = (2.0 + 3.0 * stack.dropout) * scores
    return kept


def layer_bytes(recipe: Recipe) -> float:
    """Bytes that one layer keeps for one microbatch."""
    kept, rule = kept_bytes(recipe), recipe.recompute
    whole = sum(kept.values())
    if rule.offloads:
        return 0.0
    part = sum(size for name, size in kept.items() if name in rule.keeps) + _extra(recipe, kept)
    return rule.share * min(part, whole) + (1 - rule.share) * whole


def _extra(recipe: Recipe, kept: dict[str, float]) -> float:
    """Results of products that a policy keeps although the next kernels do not read them."""
    return sum(kept["input"] for name in ("out", "down") if name in recipe.recompute.keeps)


def working_bytes(recipe: Recipe, has_head: bool) -> float:
    """Bytes of temporaries while a microbatch is processed: a recomputed layer, gathered weights, logits."""
    kept, s = kept_bytes(recipe), recipe.shape
    again = max(0.0, sum(kept.values()) - layer_bytes(recipe)) if recipe.recompute.repeats else 0.0
    widest = 2.0 * recipe.tokens * s.active * s.ffn / recipe.tensor
    layer = again + 2 * widest + kept.get("scores", 0.0)
    if recipe.zero == 3:
        # The layer at work and the one fetched ahead, in 16 bits, and the gradients on their way out.
        fetched = s.hidden * s.ffn if recipe.stack.xla else recipe.layer_params
        layer += (2 * 2 + recipe.stack.reduce_bytes) * fetched / recipe.tensor
    return max(layer, logits_bytes(recipe)) if has_head else layer


def logits_bytes(recipe: Recipe) -> float:
    """Bytes of the logits and of the values that the loss computes from them."""
    apart = recipe.stack.loss == "separate" and recipe.tensor > 1  # the split loss keeps exponentials and differences
    return (_LOGIT_BYTES[recipe.stack.loss] + 6.0 * apart) * recipe.tokens * recipe.shape.vocab / recipe.tensor


def stage_params(recipe: Recipe, stage: int) -> float:
    """Parameters of one stage, of which each tensor-parallel device holds its part."""
    s = recipe.shape
    params = recipe.layer_params * s.layers / recipe.pipeline
    params += s.embedding_params * (stage == 0)
    params += s.embedding_params * (stage == recipe.pipeline - 1 and (recipe.pipeline > 1 or not s.tied))
    return params / recipe.tensor


def state_bytes(recipe: Recipe, stage: int) -> float:
    """Bytes of parameters, gradients and optimizer state that a device of a stage keeps."""
    stack, shard = recipe.stack, max(recipe.shard, 1)
    # Gradients that are exchanged once a step stay unsharded until then, unless there is one microbatch.
    spread = recipe.zero == 3 or (recipe.zero == 2 and recipe.num_microbatches == 1)
    per_param = (
        stack.weight_bytes / (shard if recipe.zero >= 3 else 1)
        + stack.gradient_bytes / (shard if spread else 1)
        + stack.optimizer_bytes / (shard if recipe.zero >= 1 else 1)
    )
    if recipe.zero == 2 and stack.weight_bytes == 4:
        per_param += 2 - 4 + 4 / shard  # FSDP that keeps 16-bit parameters gathered between forward and backward
    return per_param * stage_params(recipe, stage)


def peak_bytes(recipe: Recipe) -> float:
    """Memory of a device where there is one stage: state, activations of every layer, and temporaries."""
    return state_bytes(recipe, 0) + recipe.shape.layers * layer_bytes(recipe) + working_bytes(recipe, has_head=True)
