"""Judges a plan from the record of its program."""

from typing import TYPE_CHECKING

from meshwright.explain.judgement import Judgement
from meshwright.explain.kinds import Kinds
from meshwright.explain.record import Program
from meshwright.explain.uses import Facts
from meshwright.explain.verdict import judge

if TYPE_CHECKING:
    from meshwright.planner.plan import Plan


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
