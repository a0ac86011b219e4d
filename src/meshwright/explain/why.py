"""Why a tensor is split as it is: the runner-ups at their true price, and what forced the choice."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import ShardingError
from meshwright.explain.explanation import BARELY, Alternative, Explanation
from meshwright.explain.judging import facts_of
from meshwright.explain.pricing import Priced, Pricing
from meshwright.explain.record import Record
from meshwright.explain.uses import Facts
from meshwright.explain.words import sharding_words, symbols
from meshwright.planner.show import cost_text
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from meshwright.planner.plan import Plan, Spec, Tensor

Ints = NDArray[np.int64]


def explain(plan: "Plan", path: str, seconds: float) -> Explanation:
    """See `Plan.explain`."""
    found = plan.find(path)
    if plan.record is None:
        raise ShardingError(
            "this plan keeps no record of its search (it has stages, or an earlier Meshwright wrote it), so nothing "
            "else can be priced; make a plan of one program with this version"
        )
    if len(found) > 1:
        names = ", ".join(t.path for t in found[:3])
        raise ShardingError(f"{path!r} matches {len(found)} tensors; explain one of them: {names}, …")
    return Explainer(plan).explain(found[0], seconds)


class Explainer:
    """Explains tensors of one plan, one after another.

    Args:
        plan: The plan.
        facts: What the plan's axes do, where that is known already.
    """

    def __init__(self, plan: "Plan", facts: Facts | None = None):
        self.plan = plan
        self.record: Record = plan.record
        self.facts = facts or facts_of(plan, self.record.program)
        floor = plan.cost.total if plan.solution.status == "optimal" else plan.solution.lower_bound
        self.pricing = Pricing(self.record, floor)
        self._free: Priced | None = None
        self._nodes = {p: i for i, node in enumerate(self.record.problem.nodes) for p in node.paths}

    def explain(self, tensor: "Tensor", seconds: float) -> Explanation:
        """One tensor's explanation, given the time for re-solving under the memory limit."""
        value, node = self._subject(tensor)
        if node < 0 or not tensor.shape:
            why = "a scalar cannot be split" if not tensor.shape else "every reader makes it as it needs it"
            return self._explanation(tensor, (tensor.path,), (), "shape", why + ".")
        problem = self.record.problem
        subject = problem.nodes[node]
        chosen = int(subject.codes[problem.choice[node]])
        codes = sorted({int(code) for code in subject.codes} - {chosen})
        priced, left = self.pricing.forced(node, codes, seconds)
        tied = tuple(subject.paths) or (tensor.path,)
        allowed = {int(code) for code in subject.codes[subject.allowed]}
        found = tuple(self._alternative(tensor, value, node, p, p.code in allowed, tied) for p in priced)
        forced_by, reason = self._reason(tensor, node, chosen, found)
        return self._explanation(tensor, tied, found, forced_by, reason, left)

    def _subject(self, tensor: "Tensor") -> tuple[int, int]:
        """The value that a tensor is, and the node that decides how it is split."""
        program = self.record.program
        if tensor.path in self._nodes:
            return self.facts.values[tensor.path], self._nodes[tensor.path]
        if tensor.path in self.facts.values:
            return self.facts.values[tensor.path], -1
        place = list(program.outputs).index(tensor.path)
        if (argument := int(program.taken[place])) >= 0:
            return argument, self._nodes.get(program.inputs[argument], -1)
        value = int(program.made[place])
        producer = int(program.producer[value])
        if producer < 0:  # an argument, handed on as it is
            return value, self._nodes.get(program.inputs[value], -1) if value < len(program.inputs) else -1
        return value, int(program.node[producer])

    def _alternative(
        self, tensor: "Tensor", value: int, node: int, priced: Priced, allowed: bool, tied: tuple[str, ...]
    ) -> Alternative:
        limit = self.record.problem.limit
        spec = self.facts.spec_of(value, priced.code)
        changes = () if priced.choice is None else tuple(self.pricing.changes(self.plan.mesh, priced.choice))
        priced_at = priced.at_least if priced.cost == float("inf") else priced.cost
        too_much = limit is not None and priced.peak_bytes > limit
        return Alternative(
            spec,
            symbols(tensor.shape, self.plan.judgement.letters[tensor.path], spec),
            self._words(tensor, value, node, spec, priced),
            priced.cost,
            priced.at_least,
            priced_at - self.plan.cost.total,
            priced.is_exact,
            allowed,
            not (too_much and priced.at_least == float("inf")),
            priced.peak_bytes,
            changes,
            dict.fromkeys(tied, spec),
        )

    def _words(self, tensor: "Tensor", value: int, node: int, spec: "Spec", priced: Priced) -> str:
        """``column-split over y``: what each axis would do, in the plan that was found."""
        if not any(spec):
            return "whole on every device"
        parts = self.facts.dim_parts(value) if tensor.role == "parameters" else [""] * len(spec)
        words = []
        for part, axes in zip(parts, spec, strict=True):
            for axis in axes:
                gathered = part and priced.choice is not None and not self._is_read_split(node, axis, priced.choice)
                words.append(
                    f"{'gathered before use' if gathered else f'{part}-split' if part else 'split'} over {axis}"
                )
        return ", ".join(words)

    def _is_read_split(self, node: int, axis: str, choice: Ints) -> bool:
        """Whether some reader before the update takes the tensor as an axis splits it."""
        problem, number = self.record.problem, self.facts.names.index(axis)
        last = self.record.program.phases.index("update")
        readers = [e for e in problem.edges if e.source == node and problem.nodes[e.reader].phase not in (last, -1)]
        codes = [int(e.needed[choice[e.reader]]) for e in readers]
        return any(int(problem.axes.unpack(code)[number]) >= 0 for code in codes)

    def _reason(self, tensor: "Tensor", node: int, chosen: int, found: tuple[Alternative, ...]) -> tuple[str, str]:
        plan, subject = self.plan, self.record.problem.nodes[node]
        if not found:
            return "shape", "no axis divides any of its dims: there is no other way to split it."
        usable = [a for a in found if a.allowed]
        if not usable:
            best = min(found, key=lambda a: a.difference)
            gain = cost_text(plan, abs(best.difference))
            could = f"{best.symbols} would {'save' if best.difference < 0 else 'cost'} {gain}"
            return "method", f"{plan.method} lays it down; without that, {could}."
        if (memory := self._memory_reason(node, chosen)) is not None:
            return "memory", memory
        known = [a for a in usable if a.cost < float("inf")]
        if not known:
            return "cost", "no other way was found that fits the memory."
        best = min(known, key=lambda a: a.cost)
        if best.difference <= BARELY * plan.cost.total:
            return "cost", f"{best.symbols} would cost the same: either would do."
        more, least = cost_text(plan, best.difference), "" if best.is_exact else "up to "
        why = f", mostly {best.changes[0].what}: {best.changes[0].where}" if best.changes else ""
        note = "" if subject.allowed.all() else f" ({plan.method} forbids some)"
        return (
            "cost",
            f"it is the cheapest{note}: the next, {best.symbols} ({best.words}), costs {least}{more} more{why}.",
        )

    def _memory_reason(self, node: int, chosen: int) -> str | None:
        """What memory has to do with it: how the tensor would lie if memory were no matter."""
        problem, plan = self.record.problem, self.plan
        if problem.limit is None:
            return None
        if self._free is None:
            self._free = self.pricing.free()
        assert self._free.choice is not None
        code = int(problem.nodes[node].codes[self._free.choice[node]])
        if code == chosen or self._free.peak_bytes <= problem.limit:
            return None
        shape = tuple(self.record.program.types[problem.nodes[node].type][0])
        names = tuple(tuple(self.facts.names[a] for a in axes) for axes in problem.axes.dims(code, len(shape)))
        gain = cost_text(plan, plan.cost.total - self._free.cost)
        return (
            f"memory forces it: without the limit of {format_bytes(problem.limit)} it would be "
            f"{sharding_words(shape, [''] * len(shape), names, plan.mesh.shape)}, in a plan that is {gain} faster and "
            f"needs {format_bytes(self._free.peak_bytes)} on each device."
        )

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
            sharding_words(tensor.shape, letters, tensor.spec, self.plan.mesh.shape),
            judgement.kinds[tensor.path],
            self.plan.cost.total,
            found,
            forced_by,
            reason,
            num_left,
        )
