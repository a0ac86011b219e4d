"""The judgement of a plan: its verdict, and the kind and the dims' letters of each of its tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.schema import Amount, Count, Size, built

if TYPE_CHECKING:
    from meshwright.plans.tensor import Tensor


@dataclass(frozen=True, slots=True)
class VerdictPart:
    """One part of a verdict.

    Attributes:
        name: data, tensor, sequence, spatial, expert, vocabulary, zero, idle, other or none.
        axes: The axes that it is about.
        degree: The number of parts into which they split.
        share: The share of the work (for zero: of the bytes) that it holds for.
        text: In words.
    """

    name: str
    axes: tuple[str, ...]
    degree: Count
    share: Amount
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The kinds of parallelism of a plan or of a stage; print it."""

    parts: tuple[VerdictPart, ...]

    def __str__(self) -> str:
        return ", ".join(part.text for part in self.parts)

    def axes(self, name: str) -> tuple[str, ...]:
        """The axes of the parts with a name."""
        return tuple(axis for part in self.parts if part.name == name for axis in part.axes)


@dataclass(frozen=True)
class Judgement:
    """The judgement of a plan.

    Attributes:
        verdict: Its kinds of parallelism.
        kinds: The kind of each argument and result, by path.
        letters: Letters of each one's dims, by path; empty text for dims without one.
        stages: The verdict of each stage, where there are any.
    """

    verdict: Verdict
    kinds: dict[str, str]
    letters: dict[str, tuple[str, ...]]
    stages: tuple[Verdict, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data; the few distinct kinds and letters of thousands of tensors are stored once."""
        pairs = [(self.kinds[path], " ".join(letter or "-" for letter in self.letters[path])) for path in self.kinds]
        distinct = list(dict.fromkeys(pairs))
        number = {pair: i for i, pair in enumerate(distinct)}
        data = {
            "verdict": _parts_to_json(self.verdict),
            "tensors": [list(pair) for pair in distinct],
            "of": [number[pair] for pair in pairs],
        }
        return data | ({"stages": [_parts_to_json(verdict) for verdict in self.stages]} if self.stages else {})

    @classmethod
    def from_json(cls, data: Any, tensors: Sequence["Tensor"]) -> "Judgement":
        """The inverse of `to_json`, for the same tensors."""
        saved, distinct = built(_Saved, data, "judgement"), list(_distinct(tensors))
        if len(saved.of) != len(distinct) or max(saved.of, default=-1) >= len(saved.tensors):
            raise ValueError(f"judgement.of does not name one of {len(saved.tensors)} kinds for each tensor")
        kinds, letters = {}, {}
        pairs = [(kind, tuple("" if x == "-" else x for x in text.split())) for kind, text in saved.tensors]
        for tensor, number in zip(distinct, saved.of, strict=True):
            kinds[tensor.path], letters[tensor.path] = pairs[number]
            if len(pairs[number][1]) != len(tensor.shape):
                raise ValueError(f"{tensor.path} has {len(tensor.shape)} dims, and letters of {len(pairs[number][1])}")
        return cls(Verdict(saved.verdict), kinds, letters, tuple(map(Verdict, saved.stages)))


@dataclass(frozen=True)
class _Saved:
    """What a file has of a judgement: for each distinct tensor, the number of its pair of kind and letters."""

    verdict: tuple[VerdictPart, ...]
    tensors: tuple[tuple[str, str], ...]
    of: tuple[Size, ...]
    stages: tuple[tuple[VerdictPart, ...], ...] = ()


def _parts_to_json(verdict: Verdict) -> list[list[Any]]:
    return [[p.name, list(p.axes), p.degree, p.share, p.text] for p in verdict.parts]


def _distinct(tensors: Sequence["Tensor"]) -> Iterator["Tensor"]:
    """The first tensor of each path."""
    first_of: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.role != "static":
            first_of.setdefault(tensor.path, tensor)
    return iter(first_of.values())
