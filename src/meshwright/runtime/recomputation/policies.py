"""What of the forward pass is kept for the backward pass: words for it, and the operations whose results they keep."""

from collections.abc import Collection
from difflib import get_close_matches
from fractions import Fraction
from math import floor

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import ShardingError
from meshwright.program.program import Program
from meshwright.runtime.recomputation.layers import Layers, is_heavy

AUTO, AS_WRITTEN, NONE, SELECTIVE, ALTERNATE, FULL = "auto", "as written", "none", "selective", "alternate", "full"
#: From the least work to the least memory.
KINDS = (NONE, SELECTIVE, ALTERNATE, FULL)
#: What users may ask for.
WORDS = (AUTO, AS_WRITTEN, *KINDS)


def check_word(word: object) -> None:
    """Refuses what is no policy.

    Raises:
        ShardingError: It is none; the message names the nearest one.
    """
    kind, colon, share = word.partition(":") if isinstance(word, str) else ("", "", "")
    if kind not in (KINDS if colon else WORDS):
        near = get_close_matches(kind.strip().lower(), WORDS, 1, 0.5)
        hint = f": did you mean {near[0]!r}?" if near else ";"
        raise ShardingError(f"recompute is {word!r:.60}{hint} give one of {', '.join(map(repr, WORDS))}")
    if colon and _share(share) is None:
        raise ShardingError(
            f"recompute is {word!r}, of which {share!r} is not a part of the layers above 0 and at most 1; give "
            f"'{kind}:1/2' for every second layer"
        )


def _share(text: str) -> Fraction | None:
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
    return share if 0 < share <= 1 else None


def kept_operations(program: Program, layers: Layers, word: str, moving: Collection[int] = ()) -> NDArray[np.bool_]:
    """The operations of a region whose results are kept.

    Args:
        program: The region.
        layers: Its layers.
        word: The policy: one of `KINDS`, with a part of the layers where only these follow it (``"full:1/2"``).
        moving: The region's inputs that are activations.
    """
    kind, _, text = word.partition(":")
    share = _share(text) or Fraction(1)
    kept = ~layers.forward | (layers.layer < 0)
    kept |= np.array([bool(operation.equation.effects) for operation in program.operations], bool)
    if kind == NONE:
        return np.ones_like(kept)
    for number in range(len(layers.kind)):
        inside = layers.layer == number
        nth = sum(other == layers.kind[number] for other in layers.kind[:number])
        if floor((nth + 1) * share) == floor(nth * share):
            kept |= inside
    if kind != FULL:
        products = np.flatnonzero(~kept & _worth_keeping(program, moving))
        kept[products if kind == SELECTIVE else _every_second(products, layers)] = True
    return kept


def _every_second(products: NDArray[np.int64], layers: Layers) -> list[int]:
    """Of the operations in each layer every second one, the first among them."""
    seen: dict[int, int] = {}
    chosen = []
    for number in products.tolist():
        layer = int(layers.layer[number])
        seen[layer] = seen.get(layer, 0) + 1
        if seen[layer] % 2:
            chosen.append(number)
    return chosen


def _worth_keeping(program: Program, moving: Collection[int]) -> NDArray[np.bool_]:
    """Products with weights, kernels and loops: all that is heavy but products of activations, such as attention."""
    weights = ({*program.inputs} | program.constants.keys()) - set(moving)
    found = np.zeros(len(program.operations), bool)
    for number, operation in enumerate(program.operations):
        if not is_heavy(operation):
            if all(value in weights for value in operation.inputs):
                weights.update(operation.outputs)
            continue
        found[number] = operation.name != "dot_general" or any(value in weights for value in operation.inputs)
    return found
