"""Judges a plan, or each of its stages, from the record of its program."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.parallelism.axis_uses import AxisFacts
from meshwright.parallelism.tensor_kinds import Kinds
from meshwright.parallelism.verdict import judge
from meshwright.parallelism.without_program import pipeline_verdict
from meshwright.plans.records.judgement import Judgement, Verdict

if TYPE_CHECKING:
    from meshwright.parallelism.subject.subject import Subject
    from meshwright.plans.plan import PlanData
    from meshwright.plans.tensor import Tensor


def judge_plan(plan: "PlanData", facts: AxisFacts) -> Judgement:
    """The judgement of a plan without stages."""
    named = _Named(facts)
    named.add(plan.arguments)
    named.add(plan.results)
    return Judgement(judge(facts, plan.arguments, plan.collectives), named.kinds, named.letters)


def judge_stages(plan: "PlanData") -> Judgement:
    """The judgement of a pipelined plan, stage by stage; a tensor has its kind on the first stage that has it."""
    from meshwright.parallelism.subject.subject import Subjects

    subjects = Subjects(plan)
    by_likeness: dict[Any, Verdict] = {}
    verdicts = []
    for number, subject in enumerate(subjects):
        alike = (
            plan.staged_record.view[number],
            subject.spread,
            *((n.label, n.num) for n in subject.record.problem.nodes),
        )
        if alike not in by_likeness:
            by_likeness[alike] = _judge_stage(subject)
        verdicts.append(by_likeness[alike])
    first = _Named(subjects[0].facts)
    for subject in subjects:
        named = _Named(subject.facts, first)
        named.add(subject.tensors)
    first.add(plan.arguments)
    first.add(plan.results)
    paths = [t.path for t in (*plan.arguments, *plan.results) if t.role != "static"]  # a judgement keeps their order
    kinds, letters = {path: first.kinds[path] for path in paths}, {path: first.letters[path] for path in paths}
    return Judgement(pipeline_verdict(plan, verdicts), kinds, letters, tuple(verdicts))


def _judge_stage(subject: "Subject") -> Verdict:
    # Gradients that stay on every device until the last microbatch are not sharded, however they are reduced.
    sent = [c for c in subject.collectives if subject.spread != 1 or c.axes != ("x",)]
    return judge(subject.facts, subject.tensors, sent)


class _Named:
    """Kinds and letters by path.

    Args:
        facts: The uses of the axes.
        known: The dictionary to fill; a new one by default.
    """

    def __init__(self, facts: AxisFacts, known: "_Named | None" = None):
        self.facts, self.of = facts, Kinds(facts)
        self.kinds: dict[str, str] = {} if known is None else known.kinds
        self.letters: dict[str, tuple[str, ...]] = {} if known is None else known.letters
        program = facts.program
        self.made = dict(zip(program.outputs, program.made.tolist(), strict=True))
        self.taken = dict(zip(program.outputs, program.taken.tolist(), strict=True))

    def add(self, tensors: "Sequence[Tensor]") -> None:
        """Names tensors that have no name yet; the next values of arguments are named like the arguments."""
        facts = self.facts
        for tensor in tensors:
            if tensor.role == "static" or tensor.path in self.kinds:
                continue
            argument = self.taken.get(tensor.path, -1)
            path = facts.program.inputs[argument] if argument >= 0 else ""
            self.kinds[tensor.path] = self.kinds[path] if path in self.kinds else self.of.kind(tensor)
            value = facts.values[tensor.path] if tensor.path in facts.values else self.made[tensor.path]
            self.letters[tensor.path] = tuple(facts.letters_of(value))
