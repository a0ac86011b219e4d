"""The judgement of a plan: its verdict, and the kind and the dims' letters of each of its tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.explain.kinds import Kinds
from meshwright.explain.record import Program
from meshwright.explain.uses import Facts
from meshwright.explain.verdict import Part, Verdict, judge

if TYPE_CHECKING:
    from meshwright.planner.plan import Plan, Tensor


@dataclass(frozen=True)
class Judgement:
    """What a plan amounts to.

    Attributes:
        verdict: What kind of parallelism it is.
        kinds: The kind of each argument and result, by path.
        letters: Letters of each one's dims, by path; empty text for dims without one.
    """

    verdict: Verdict
    kinds: dict[str, str]
    letters: dict[str, tuple[str, ...]]

    def to_json(self) -> dict[str, Any]:
        """Plain data; kinds and letters of thousands of tensors are few, and go by number."""
        pairs = [(self.kinds[path], " ".join(letter or "-" for letter in self.letters[path])) for path in self.kinds]
        known = list(dict.fromkeys(pairs))
        parts = [[p.name, list(p.axes), p.degree, p.share, p.text] for p in self.verdict.parts]
        return {"verdict": parts, "tensors": [list(pair) for pair in known], "of": [known.index(p) for p in pairs]}

    @classmethod
    def from_json(cls, data: dict[str, Any], tensors: Sequence["Tensor"]) -> "Judgement":
        """What `to_json` gave, of the same tensors."""
        verdict = Verdict(tuple(Part(name, tuple(axes), *rest) for name, axes, *rest in data["verdict"]))
        kinds, letters = {}, {}
        known = [(kind, tuple("" if x == "-" else x for x in text.split())) for kind, text in data["tensors"]]
        for path, number in zip(_paths(tensors), data["of"], strict=True):
            kinds[path], letters[path] = known[number]
        return cls(verdict, kinds, letters)


def facts_of(plan: "Plan", program: Program) -> Facts:
    """What the axes of a plan's mesh do in its program."""
    return Facts(program, plan.mesh.names, plan.mesh.sizes, {t.path: t.role for t in plan.arguments})


def judge_plan(plan: "Plan", facts: Facts) -> Judgement:
    """The judgement of a plan."""
    kinds, letters = {}, {}
    of = Kinds(facts)
    results = {path: int(value) for path, value in zip(facts.program.outputs, facts.program.made, strict=True)}
    named = {t.path: of.kind(t) for t in plan.arguments if t.role != "static"}
    taken = dict(zip(facts.program.outputs, facts.program.taken.tolist(), strict=True))
    for tensor in (*plan.arguments, *plan.results):
        if tensor.role == "static":
            continue
        argument = taken.get(tensor.path, -1)
        kinds[tensor.path] = named[facts.program.inputs[argument]] if argument >= 0 else of.kind(tensor)
        value = facts.values[tensor.path] if tensor.path in facts.values else results[tensor.path]
        letters[tensor.path] = tuple(facts.letters_of(value))
    return Judgement(judge(facts, plan.arguments, plan.collectives), kinds, letters)


def _paths(tensors: Sequence["Tensor"]) -> Iterator[str]:
    return iter(dict.fromkeys(t.path for t in tensors if t.role != "static"))
