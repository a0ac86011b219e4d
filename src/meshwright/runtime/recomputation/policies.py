"""What of the forward pass is kept for the backward pass, for each kind of layer: words for it, and what they keep.

A policy says for each kind of layer, in the order in which `recomputed.py` meets them, how its layers share some
levels: ``"full:3/8, selective:5/8 | none"``. One kind alone stands for all; what no share is left for is kept. A level
is one of `LEVELS`, or names the places of the operations in a layer whose results stay on the device and of those whose
results go to the host: ``"keep 3 17 offload 25"``. Whatever a level does not name is computed again.
"""

from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Bools
from meshwright.errors import ShardingError
from meshwright.program.program import Program
from meshwright.runtime.recomputation.layers import Layers, is_heavy

AUTO, AS_WRITTEN, NONE, SELECTIVE, ALTERNATE, FULL = "auto", "as written", "none", "selective", "alternate", "full"
OFFLOAD = "offload"
#: From the least work to the least memory of the device; by the last, what layers hand on is kept on the host.
LEVELS = (NONE, SELECTIVE, ALTERNATE, FULL, OFFLOAD)
#: What users may ask for.
WORDS = (AUTO, AS_WRITTEN, *LEVELS)
_KEEP, _AWAY = "keep", OFFLOAD


class Part(NamedTuple):
    """A level, and the share of a kind's layers that have it."""

    level: str
    share: Fraction


class Retained(NamedTuple):
    """The operations of a region whose results are kept, and those of them whose results go to the host."""

    at_all: Bools
    on_host: Bools


def check_word(word: object) -> None:
    """Refuses what is no policy.

    Raises:
        ShardingError: It is none; the message names the nearest one.
    """
    if word not in (AUTO, AS_WRITTEN):
        parsed(word)


def parsed(text: object) -> tuple[tuple[Part, ...], ...]:
    """A policy, the parts of each kind; those of one kind add up to all of its layers.

    Raises:
        ShardingError: It is none.
    """
    kinds = text.split("|") if isinstance(text, str) else [""]
    return tuple(_kind(text, kind) for kind in kinds)


def uses_host(policy: str) -> bool:
    """Whether a policy keeps anything in the host's memory."""
    return _AWAY in policy


def worded(policy: Sequence[Sequence[Part]]) -> str:
    """The text of a policy: the inverse of `parsed`, in as few words as possible."""
    kinds = [", ".join(_part(part) for part in parts if part.level != NONE) or NONE for parts in policy]
    return kinds[0] if len(set(kinds)) == 1 else " | ".join(kinds)


def places(kept: Sequence[int], away: Sequence[int] = ()) -> str:
    """The level that keeps the results of the operations at some places, on the device and on the host."""
    text = f"{_KEEP} {' '.join(map(str, kept))}" if kept else ""
    return f"{text} {_AWAY} {' '.join(map(str, away))}".strip() if away else text or FULL


class Deciding:
    """Says of one region of a step after another what is kept.

    Args:
        text: The policy.
    """

    def __init__(self, text: str):
        self.policy = parsed(text)
        self.number = 0

    def __call__(self, program: Program, layers: Layers, moving: Collection[int] = (), trips: int = 0) -> Retained:
        """What a region keeps.

        Args:
            program: The region.
            layers: Its layers.
            moving: The region's inputs that are activations.
            trips: How often a loop repeats it, which does not matter here.
        """
        kept = always_kept(program, layers)
        found = Retained(kept, np.zeros_like(kept))
        worth = worth_keeping(program, moving)
        for kind in range(layers.num_kinds):
            parts = self.policy[min(self.number, len(self.policy) - 1)]
            self.number += 1
            for level, number in zip(_spread(parts), layers.of_kind(kind), strict=False):
                inside = np.flatnonzero(layers.layer == number)
                for where, chosen in zip(found, level_of(level, layers, inside, worth), strict=True):
                    where[chosen] = True
        return found

    def check_count(self) -> None:
        """Refuses a policy of more or fewer kinds of layers than the step has, once all regions are decided.

        Raises:
            ShardingError: It names several kinds, and not as many.
        """
        if len(self.policy) not in (1, self.number):
            raise ShardingError(
                f"recompute names {len(self.policy)} kinds of layers, and this step has {self.number}: give one policy "
                "for each, in the order of the step, or one for all"
            )


def all_kept(program: Program) -> Retained:
    """Everything that a region computes, on the device."""
    return Retained(np.ones(len(program.operations), bool), np.zeros(len(program.operations), bool))


def always_kept(program: Program, layers: Layers) -> Bools:
    """The operations that never run again: those of no layer, and those with effects."""
    kept = ~layers.forward | (layers.layer < 0)
    return kept | np.array([bool(operation.equation.effects) for operation in program.operations], bool)


def level_of(
    level: str, layers: Layers, inside: NDArray[np.int64], worth: Bools
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of the operations of a layer those whose results a level keeps, and those of them that go to the host."""
    nothing = inside[:0]
    if level == OFFLOAD:
        handed = inside[layers.hands_on[inside]]
        return handed, handed
    if level in (FULL, NONE):
        return (nothing if level == FULL else inside), nothing
    if level in LEVELS:
        products = inside[worth[inside]]
        return (products[::2] if level == ALTERNATE else products), nothing
    named = _places(level)
    assert named is not None, level
    here, away = (inside[np.isin(layers.place[inside], numbers)] for numbers in named)
    return np.concatenate([here, away]), away


def worth_keeping(program: Program, moving: Collection[int]) -> Bools:
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


def _kind(text: object, kind: str) -> tuple[Part, ...]:
    """The parts of one kind; the layers that none is said of keep everything."""
    parts = [_read(text, one) for one in kind.split(",")]
    rest = 1 - sum((part.share for part in parts), Fraction(0))
    if rest < 0:
        raise ShardingError(f"recompute is {text!r}, whose shares {kind.strip()!r} are more than all layers")
    return (Part(NONE, rest), *parts) if rest else tuple(parts)


def _read(text: object, part: str) -> Part:
    level, colon, share = part.strip().partition(":")
    if level not in LEVELS and _places(level) is None:
        near = get_close_matches(level.strip().lower(), WORDS, 1, 0.5)
        hint = f": did you mean {near[0]!r}?" if near else ";"
        raise ShardingError(f"recompute is {text!r:.60}{hint} give one of {', '.join(map(repr, WORDS))}")
    if colon and _share(share) is None:
        raise ShardingError(
            f"recompute is {text!r}, of which {share!r} is not a part of the layers above 0 and at most 1; give "
            f"'{level}:1/2' for every second layer"
        )
    return Part(level, _share(share) or Fraction(1))


def _part(part: Part) -> str:
    return part.level if part.share == 1 else f"{part.level}:{part.share}"


def _share(text: str) -> Fraction | None:
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
    return share if 0 < share <= 1 else None


def _places(level: str) -> tuple[list[int], list[int]] | None:
    """The places of operations whose results a level keeps on the device, and of those that it sends to the host."""
    found: dict[str, list[int]] = {_KEEP: [], _AWAY: []}
    where = None
    for word in level.split():
        if word in found:
            where = found[word]
        elif where is None or not word.isdecimal():
            return None
        else:
            where.append(int(word))
    return (found[_KEEP], found[_AWAY]) if where is not None else None


def _spread(parts: Sequence[Part]) -> Iterator[str]:
    """The levels of a kind's layers, one after another: each as evenly as its share allows."""
    owed = [Fraction(0)] * len(parts)
    while True:
        owed = [due + part.share for due, part in zip(owed, parts, strict=True)]
        chosen = owed.index(max(owed))
        owed[chosen] -= 1
        yield parts[chosen].level
