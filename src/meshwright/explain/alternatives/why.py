"""Explains a tensor's sharding: the price of every other sharding, and the reason for the choice."""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from meshwright.arrays import Ints
from meshwright.errors import ShardingError
from meshwright.explain.alternatives.explanation import BARELY, Alternative, Effect, Explanation
from meshwright.explain.alternatives.forced import ForcedPlan, Pricing
from meshwright.parallelism.axis_uses import looked_up, place_of
from meshwright.parallelism.dim_names import major_loops
from meshwright.parallelism.subject.subject import Subject, Subjects
from meshwright.parallelism.words import sharding_words, symbols
from meshwright.plans.records.traced_program import RecordedProgram
from meshwright.plans.text import cost_text
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from meshwright.explain.alternatives.step_effects import Effects
    from meshwright.plans.plan import PlanData, Spec, Tensor


def explain(plan: "PlanData", path: str, seconds: float) -> Explanation:
    """See `Plan.explain`."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise ShardingError(f"seconds is {seconds!r}; give the time for solving again, 0 or more")
    matching = plan.find(path)
    if plan.record is None:
        raise ShardingError(
            "this plan keeps no record of its search (an earlier Meshwright wrote it), so nothing else can be priced; "
            "make the plan again with this version"
        )
    if len(matching) > 1:
        names = ", ".join(t.path for t in matching[:3])
        raise ShardingError(f"{path!r} matches {len(matching)} tensors; explain one of them: {names}, …")
    return Explainer(Subjects(plan).of(matching[0])).explain(matching[0], seconds)


def _effects(subject: Subject) -> "Effects":
    from meshwright.explain.alternatives.step_effects import Effects

    return Effects(subject)


class Explainer:
    """Explains tensors of one program, one after another.

    Args:
        subject: The program of a plan, or a stage of it.
    """

    def __init__(self, subject: Subject):
        self.subject, self.plan, self.record = subject, subject.plan, subject.record
        self._values = {path: value for value, path in enumerate(self.record.program.inputs)}
        self.effects = None if subject.number is None else _effects(subject)
        self._nodes = {p: i for i, node in enumerate(self.record.problem.nodes) for p in node.paths}

    @cached_property
    def pricing(self) -> Pricing:
        """Prices of the alternatives."""
        if self.effects is not None:  # the plan's bound does not hold for a stage
            return Pricing(self.record)
        solution = self.plan.solution
        # Under a limit, a plan is optimal among those that keep as much memory free as its solver did.
        is_least = solution.status == "optimal" and self.record.problem.limit is None
        return Pricing(self.record, self.plan.cost.total if is_least else solution.lower_bound)

    @property
    def _free(self) -> ForcedPlan:
        return self.pricing.free

    def explain(self, tensor: "Tensor", seconds: float | None) -> Explanation:
        """One tensor's explanation.

        Args:
            tensor: The tensor.
            seconds: Time for re-solving under the memory limit; None to bound the alternatives without solving them.
        """
        value, node = self._subject(tensor)
        if node < 0 or not tensor.shape:
            why = (
                "a scalar cannot be split"
                if not tensor.shape
                else "every operation that reads it makes it in the sharding it needs"
            )
            return self._explanation(tensor, (tensor.path,), (), "shape", why + ".")
        problem = self.record.problem
        subject = problem.nodes[node]
        chosen = int(subject.codes[problem.choice[node]])
        codes = sorted({int(code) for code in subject.codes} - {chosen})
        if seconds is None:
            priced, left = self.pricing.bounded(node, codes), 0
        else:
            priced, left = self.pricing.forced(node, codes, seconds)
        tied = tuple(subject.paths) or (tensor.path,)
        allowed = {int(code) for code in subject.codes[subject.allowed]}
        matching = tuple(self._alternative(tensor, value, node, p, p.code in allowed, tied) for p in priced)
        if self.effects is not None:  # a cheap alternative in the stage may be expensive in the step
            matching = tuple(sorted(matching, key=lambda a: (a.cost, a.at_least)))
        forced_by, reason = self._reason(node, chosen, matching)
        return self._explanation(tensor, tied, matching, forced_by, reason, left)

    def _subject(self, tensor: "Tensor") -> tuple[int, int]:
        """The value of a tensor, and the node that decides its sharding."""
        program = self.record.program
        if tensor.path in self._nodes:
            return self._values[tensor.path], self._nodes[tensor.path]
        if tensor.path in self._values:
            return self._values[tensor.path], -1
        place = list(program.outputs).index(tensor.path)
        if (argument := int(program.taken[place])) >= 0:
            return argument, self._nodes.get(program.inputs[argument], -1)
        value = int(program.made[place])
        producer = int(program.producer[value])
        if producer < 0:  # an argument that is returned unchanged
            return value, self._nodes.get(program.inputs[value], -1) if value < len(program.inputs) else -1
        return value, int(program.node[producer])

    def _alternative(
        self, tensor: "Tensor", value: int, node: int, priced: ForcedPlan, allowed: bool, tied: tuple[str, ...]
    ) -> Alternative:
        limit = self.record.problem.limit
        spec = self._spec(tensor, priced.code)
        where = (self.subject.mesh, self.subject.names)
        changes = () if priced.choice is None else tuple(self.pricing.changes(*where, priced.choice))
        too_much = limit is not None and priced.peak_bytes > limit
        cost, at_least, effect = self._costs(priced)
        return Alternative(
            spec,
            symbols(tensor.shape, self.plan.judgement.letters[tensor.path], spec),
            self._words(tensor, value, node, spec, priced),
            cost,
            at_least,
            (at_least if cost == float("inf") else cost) - self.plan.cost.total,
            priced.is_exact,
            allowed,
            not (too_much and priced.at_least == float("inf")),
            max(0, priced.peak_bytes - round(self.subject.level_bytes)) if priced.peak_bytes else 0,
            changes,
            dict.fromkeys(tied, spec) if effect is None else {},
            effect,
        )

    def _costs(self, priced: ForcedPlan) -> tuple[float, float, Effect | None]:
        """The time of a step with the plan found, a lower bound on it and, in a stage, the effect of the stage."""
        if self.effects is None:
            return priced.cost, priced.at_least, None
        total = self.plan.cost.total
        at_least = total + priced.at_least - self.effects.cost
        if priced.choice is None:
            return priced.cost, at_least, Effect(0.0, 0.0, 0.0)
        effect = self.effects.of(priced.choice)
        cost = total + effect.step_s
        return cost, cost if priced.is_exact else min(cost, at_least), effect

    def _spec(self, tensor: "Tensor", code: int) -> "Spec":
        """A sharding with its axes' names; state sharded over replicas stays so."""
        names, rank = self.subject.names, len(tensor.shape)
        kept = [tuple(a for a in axes if a not in names) for axes in tensor.spec]
        dims = self.record.problem.axes.dims(code, rank)
        return tuple((*more, *(names[a] for a in axes)) for more, axes in zip(kept, dims, strict=True))

    def _words(self, tensor: "Tensor", value: int, node: int, spec: "Spec", priced: ForcedPlan) -> str:
        """The use of each axis in the plan that was found, such as ``column-split over y``."""
        if not any(spec):
            return "whole on every device"
        spec = tuple(tuple(axis for axis in axes if axis in self.subject.names) for axes in spec)
        if not any(spec):
            return "not split further"
        parts = dim_parts(self.record.program, value) if tensor.role == "parameters" else [""] * len(spec)
        words = []
        for part, axes in zip(parts, spec, strict=True):
            for axis in axes:
                gathered = part and priced.choice is not None and not self._is_read_split(node, axis, priced.choice)
                words.append(
                    f"{'gathered before use' if gathered else f'{part}-split' if part else 'split'} over {axis}"
                )
        return ", ".join(words)

    def _is_read_split(self, node: int, axis: str, choice: Ints) -> bool:
        """Whether some reader before the update takes the tensor split along an axis."""
        problem, number = self.record.problem, self.subject.names.index(axis)
        last = self.record.program.phases.index("update")
        readers = [e for e in problem.edges if e.source == node and problem.nodes[e.reader].phase not in (last, -1)]
        codes = [int(e.needed[choice[e.reader]]) for e in readers]
        return any(int(problem.axes.unpack(code)[number]) >= 0 for code in codes)

    def _reason(self, node: int, chosen: int, found: tuple[Alternative, ...]) -> tuple[str, str]:
        plan, subject = self.plan, self.record.problem.nodes[node]
        if not found:
            return "shape", "no axis divides any of its dims, so it has no other sharding."
        usable = [a for a in found if a.allowed]
        if not usable:
            best = min(found, key=lambda a: a.difference)
            gain = cost_text(plan, abs(best.difference))
            could = f"{best.symbols} would {'save' if best.difference < 0 else 'cost'} {gain}"
            # Auto may take the plan of a named method, or fix what the user fixes: it prescribes nothing of its own.
            fixed = "Auto took a plan in which it is fixed" if plan.method == "Auto" else f"{plan.method} prescribes it"
            return "method", f"{fixed}; without that, {could}."
        if (memory := self._memory_reason(node, chosen)) is not None:
            return "memory", memory
        solved = [a for a in usable if a.cost < float("inf")]
        if not solved and not any(a.peak_bytes for a in usable):
            at_least = min(a.difference for a in usable)
            if at_least <= BARELY * plan.cost.total:
                return (
                    "cost",
                    "no other sharding was solved for, and their lower bounds do not prove that they cost more.",
                )
            return "cost", f"every other sharding costs at least {cost_text(plan, at_least)} more."
        if not solved:
            return "cost", "no plan with another sharding that fits the memory was found in the time allowed."
        best = min(solved, key=lambda a: a.cost)
        if best.difference < -BARELY * plan.cost.total:
            saved = cost_text(plan, -best.difference)
            return "cost", f"all layers were solved together; for this stage alone, {best.symbols} would save {saved}."
        if best.difference <= BARELY * plan.cost.total:
            return "cost", f"{best.symbols} would cost the same; the choice between the two is arbitrary."
        more, least = cost_text(plan, best.difference), "" if best.is_exact else "up to "
        why = f", mostly {best.changes[0].what}: {best.changes[0].where}" if best.changes else ""
        note = "" if subject.allowed.all() else f" that {plan.method} allows"
        second = f"the next cheapest, {best.symbols} ({best.words}), costs {least}{more} more{why}"
        return "cost", f"it is the cheapest{note}: {second}."

    def _memory_reason(self, node: int, chosen: int) -> str | None:
        """Why the memory limit decides, if it does: without it the tensor has another sharding in the best plan."""
        problem, plan = self.record.problem, self.plan
        if problem.limit is None:
            return None
        assert self._free.choice is not None
        code = int(problem.nodes[node].codes[self._free.choice[node]])
        if code == chosen or self._free.peak_bytes <= problem.limit:
            return None
        shape = tuple(self.record.program.types[problem.nodes[node].type][0])
        names = tuple(tuple(self.subject.names[a] for a in axes) for axes in problem.axes.dims(code, len(shape)))
        gain = cost_text(plan, plan.cost.total - self._costs(self._free)[0])
        level = self.subject.level_bytes
        return (
            f"memory forces it: without the limit of {format_bytes(problem.limit - level)} it would be "
            f"{sharding_words(shape, [''] * len(shape), names, self._mesh)}, in a plan that is {gain} faster and "
            f"needs {format_bytes(self._free.peak_bytes - level)} on each device."
        )

    @property
    def _mesh(self) -> dict[str, int]:
        stage = self.subject.stage
        return (self.plan.mesh if stage is None else stage.mesh).shape

    def _explanation(
        self,
        tensor: "Tensor",
        tied: tuple[str, ...],
        found: tuple[Alternative, ...],
        forced_by: str,
        reason: str,
        num_left: int = 0,
    ) -> Explanation:
        judgement = self.plan.judgement
        letters = judgement.letters[tensor.path]
        return Explanation(
            self.plan,
            tensor.path,
            tied,
            tensor.spec,
            symbols(tensor.shape, letters, tensor.spec),
            sharding_words(tensor.shape, letters, tensor.spec, self._mesh),
            judgement.kinds[tensor.path],
            self.plan.cost.total,
            found,
            forced_by,
            reason,
            num_left,
            self.subject.number,
            "" if self.effects is None else self.effects.text(),
        )


def dim_parts(program: RecordedProgram, parameter: int) -> list[str]:
    """For each dim of a parameter, the use of an axis that splits it in the first product with the parameter."""
    rank = len(program.shape(parameter))
    for op, operand in _readers(program, parameter):
        nest = program.nests[int(program.nest[op])]
        if nest.flops > 0 or looked_up(nest):
            parts = [place_of(nest, operand, loop) for loop in major_loops(nest, nest.operands[operand])]
            return ["layer"] * (rank - len(parts)) + parts[:rank]  # a scan reads one layer at a time
    return [""] * rank


def _readers(program: RecordedProgram, parameter: int) -> Iterator[tuple[int, int]]:
    """Operations, with the operand, that read a parameter or a value made from it alone, such as a cast."""
    waiting = [parameter]
    for value in waiting:
        for at in np.flatnonzero(program.reads == value).tolist():
            op = int(np.searchsorted(program.start, at, side="right")) - 1
            yield op, at - int(program.start[op])
            if program.nests[int(program.nest[op])].flops == 0 and set(program.reads_of(op)) == {value}:
                waiting += program.made_by(op)
