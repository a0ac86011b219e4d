"""The verdict: the kinds of parallelism in a plan, per mesh axis, in the usual words.

It follows from the facts of `axis_uses.py`, weighted by the work of the products; `docs/guides/see.md` states the rules
in words.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING

from meshwright.parallelism.axis_uses import AxisFacts, Use
from meshwright.parallelism.tensor_kinds import ZERO, Kinds
from meshwright.plans.records.judgement import Verdict, VerdictPart
from meshwright.plans.records.traced_program import VIRTUAL
from meshwright.rules.families.attention import FORWARD

if TYPE_CHECKING:
    from meshwright.plans.plan import Collective, Tensor

_ALL = 0.9  # from this share of the work on, a statement holds for all of it
_WORTH = 0.1  # a part with a smaller share is not mentioned
_EXPERTS = 0.02  # experts are mentioned from this share on, parameters from _SOME of the bytes on
_MOST = 0.5  # share of the bytes from which the state is called sharded; from _SOME on it is mentioned
_SOME = 0.2
_PAIRED = 0.9  # share of the work in pairs of columns and rows from which a split is Megatron's


def judge(facts: AxisFacts, tensors: Sequence["Tensor"], collectives: Iterable["Collective"]) -> Verdict:
    """The verdict of a plan.

    Args:
        facts: The uses of the axes.
        tensors: The arguments.
        collectives: The plan's communication, which shows how gradients are reduced.
    """
    return Verdict(tuple(_Judge(facts, tensors, collectives).parts()))


class _Judge:
    def __init__(self, facts: AxisFacts, tensors: Sequence["Tensor"], collectives: Iterable["Collective"]):
        self.facts, self.tensors, self.collectives = facts, tensors, list(collectives)
        self.kinds = Kinds(facts)
        self.used = [a for a, size in enumerate(facts.axes.sizes) if size > 1]
        self.work: dict[int, dict[str, float]] = {a: defaultdict(float) for a in self.used}
        self.looked_up: set[int] = set()  # axes over which a table is looked up in parts
        self.at_rest = [axis for t in tensors if t.role == "data" and t.spec for axis in t.spec[0]]
        for use in facts.uses:
            self.work[use.axis][use.part] += use.flops
            if use.part == "vocabulary":
                self.looked_up.add(use.axis)

    def parts(self) -> list[VerdictPart]:
        if not self.used:
            return [VerdictPart("none", (), 1, 1.0, "one device: nothing is split")]
        if not facts_have_work(self.facts):
            return [*self._without_weights()]
        parts = [*self._data(), *self._tensor(), *self._along("sequence"), *self._along("spatial"), *self._context()]
        parts += [*self._experts(), *self._vocabulary(), *self._between(), *self._other(), *self._zero(), *self._idle()]
        return parts or [*self._without_weights()]

    def _share(self, axis: int, *names: str) -> float:
        total = sum(self.work[axis].values())
        return sum(self.work[axis][name] for name in names) / total if total else 0.0

    def _names(self, axes: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.facts.names[a] for a in axes)

    def _degree(self, axes: Iterable[int]) -> int:
        return prod(self.facts.axes.sizes[a] for a in axes)

    def _say(self, name: str, axes: Sequence[int], share: float, words: str) -> VerdictPart:
        """``words`` has places for the degree and for the axes."""
        *most, last = self._names(axes)
        over = f"{', '.join(most)} and {last}" if most else last
        rest = "" if share >= _ALL else f" in {100 * share:.0f}% of the work"
        return VerdictPart(
            name, self._names(axes), self._degree(axes), share, words.format(n=self._degree(axes), over=over) + rest
        )

    def _data(self) -> Iterable[VerdictPart]:
        shares = {a: self._share(a, "batch") for a in self.used}
        shares = {a: share / (1 - self._share(a, "expert")) for a, share in shares.items() if share >= _WORTH}
        whole = [a for a, share in shares.items() if share >= _ALL]
        if whole:
            yield self._say("data", whole, 1.0, "data parallel ×{n} over {over}")
        for a, share in shares.items():
            if a not in whole:
                yield self._say("data", [a], share, "data parallel ×{n} over {over}")

    def _tensor(self) -> Iterable[VerdictPart]:
        groups: dict[tuple[str, float], list[int]] = {}
        for a in self.used:
            if self._share(a, "column", "row") < _WORTH:
                continue
            inside = 1 - self._share(a, "vocabulary", "expert")
            share = self._share(a, "column", "row") / inside
            groups.setdefault((self._tensor_words(a), 1.0 if share >= _ALL else round(share, 2)), []).append(a)
        for (words, share), axes in groups.items():
            yield self._say("tensor", axes, share, words)

    def _tensor_words(self, axis: int) -> str:
        uses = [u for u in self.facts.uses if u.axis == axis and u.part in ("column", "row") and u.flops]
        columns, rows = ({u.dim_class for u in uses if u.part == part} for part in ("column", "row"))
        paired = sum(u.flops for u in uses if u.dim_class in columns & rows)
        if paired >= _PAIRED * sum(u.flops for u in uses):
            return "Megatron tensor parallel ×{n} over {over}"
        how = "columns and rows" if columns and rows else "columns" if columns else "rows"
        return f"tensor parallel ×{{n}} over {{over}} ({how})"

    def _along(self, name: str) -> Iterable[VerdictPart]:
        for a in self.used:
            if (share := self._share(a, name)) >= _WORTH:
                yield self._say(name, [a], share, name + " parallel ×{n} over {over}")

    def _context(self) -> Iterable[VerdictPart]:
        """How fused attention sees the keys of other devices where the sequence is split."""
        program, found = self.facts.program, dict[str, list[int]]()
        for op in program.running:
            if not program.labels[program.label[op]].endswith(FORWARD):
                continue
            nest, assigned = program.nests[program.nest[op]], program.assignments[program.assignment[op]]
            tokens = {loop for d in self._tokens(op) for loop in nest.operands[0][d]}
            heads = {loop for dim in nest.operands[1] for loop in dim} - tokens
            ring = tokens & {loop for dim in nest.operands[1] for loop in dim}
            for a in self.used:
                how = (
                    "attention over the sequence, keys in a ring"
                    if assigned[a] in ring
                    else "attention over the sequence, keys gathered"
                    if assigned[a] in tokens
                    else "heads exchanged for the sequence inside attention"
                    if assigned[a] in heads and self._share(a, "sequence") >= _WORTH
                    else ""
                )
                if how and a not in found.setdefault(how, []):
                    found[how].append(a)
        for how, axes in found.items():
            yield self._say("context", axes, 1.0, how + " ×{n} over {over}")

    def _tokens(self, op: int) -> list[int]:
        """The dims of a fused attention's queries that are split as the sequence is."""
        classes = self.facts.classes.of(self.facts.program.reads_of(op)[0])
        return [d for d, c in enumerate(classes) if c in self.facts.sequence]

    def _experts(self) -> Iterable[VerdictPart]:
        axes = [a for a in self.used if self._share(a, "expert") >= _EXPERTS]
        if axes:
            yield self._say("expert", axes, 1.0, "experts over {over}")

    def _vocabulary(self) -> Iterable[VerdictPart]:
        axes = [a for a in self.used if a in self.looked_up]
        if axes:
            yield self._say("vocabulary", axes, 1.0, "vocabulary over {over}")

    def _between(self) -> Iterable[VerdictPart]:
        """Axes that split the sequence between products that do not: Megatron's sequence parallelism."""
        program, facts = self.facts.program, self.facts
        total, split = 0.0, defaultdict[int, float](float)
        forward = program.phases.index("forward")
        for op in program.running:
            nest = program.nests[program.nest[op]]
            if program.phase[op] != forward or nest.flops or program.assignment[op] == VIRTUAL or not nest.results:
                continue
            value = program.made_by(op)[0]
            where = [d for d, c in enumerate(facts.classes.of(value)) if c in facts.sequence]
            if not where or len(nest.results[0]) < 3:
                continue
            size = float(prod(program.shape(value))) * float(program.trips[op])
            total += size
            for axis, loop in enumerate(program.assignments[program.assignment[op]]):
                if loop >= 0 and any(loop in nest.results[0][d] for d in where):
                    split[axis] += size
        axes = [a for a in self.used if total and split[a] >= 0.2 * total and self._share(a, "sequence") < _WORTH]
        if axes:
            yield self._say("sequence", axes, 1.0, "sequence split between products over {over}")

    def _other(self) -> Iterable[VerdictPart]:
        for a in self.used:
            if (share := self._share(a, "other")) >= _WORTH:
                largest = max((u for u in self.facts.uses if u.axis == a and u.part == "other"), key=_flops)
                words = f"{self._product_split(largest.op, a)} split ×{{n}} over {{over}}"
                yield self._say("other", [a], share, words)

    def _zero(self) -> Iterable[VerdictPart]:
        state = {role: self._gathered(role) for role in ("parameters", "optimizer")}
        groups: dict[str, list[int]] = {}
        shares: dict[str, float] = {}
        for a in self.used:
            share = {role: state[role][self.facts.names[a]] for role in state}
            on_data = self.facts.names[a] in (*self.kinds.data_axes, *self.at_rest)
            if share["parameters"] >= _MOST:
                words = "parameters, gradients and optimizer state sharded over {over} (ZeRO-3, FSDP)"
                if share["optimizer"] < _MOST or not on_data:
                    words = "parameters sharded over {over} and gathered before use"
            elif share["optimizer"] >= _MOST:
                words = "optimizer state sharded over {over} (ZeRO-1)"
                if self._scattered(self.facts.names[a]):
                    words = "gradients and optimizer state sharded over {over} (ZeRO-2)"
            elif share["parameters"] >= _SOME:
                what = ", gathered before use"
                if share["optimizer"] >= _SOME and on_data:
                    what = " with their gradients and optimizer state (ZeRO-3, FSDP)"
                words = f"{100 * share['parameters']:.0f}% of the parameters sharded over {{over}}{what}"
            elif share["optimizer"] >= _SOME:
                words = f"{100 * share['optimizer']:.0f}% of the optimizer state sharded over {{over}}"
            else:
                continue
            groups.setdefault(words, []).append(a)
            shares[words] = max(share.values())
        for words, axes in groups.items():
            part = self._say("zero", axes, 1.0, words)
            yield VerdictPart(part.name, part.axes, part.degree, shares[words], part.text)

    def _gathered(self, role: str) -> dict[str, float]:
        """For each axis the share of the bytes of a role that it splits and that products read whole along it."""
        total, gathered = 0.0, defaultdict[str, float](float)
        for tensor in self.tensors:
            if tensor.role == role:
                size = float(prod(tensor.shape))
                total += size
                parts = self.kinds.parts(self.facts.values[tensor.path], tensor.spec)
                for axis in (axis for axis, part in parts.items() if part == ZERO):
                    gathered[axis] += size
        return defaultdict(float, {axis: size / total for axis, size in gathered.items()})

    def _scattered(self, axis: str) -> bool:
        """Whether gradients are reduced over an axis by reduce-scatter rather than by all-reduce."""
        sent: dict[str, float] = defaultdict(float)
        for item in self.collectives:
            if item.purpose == "gradient" and axis in item.axes:
                sent[item.kind] += item.bytes * item.trips
        return sent["reduce_scatter"] > sent["all_reduce"]

    def _idle(self) -> Iterable[VerdictPart]:
        for a in self.used:
            share = self._share(a, "idle")
            if share >= _ALL:
                words = "{over} idle: its devices repeat the same work"
                if self.facts.names[a] in self.at_rest:
                    words = "data parallel over {over} at rest only: its devices gather the batch and repeat the work"
                yield self._say("idle", [a], share, words)
            elif share >= 0.1:
                yield self._say("idle", [a], share, "{over} idle")

    def _without_weights(self) -> Iterable[VerdictPart]:
        """A program without products of weights: its largest product as it is split, or else its arguments."""
        program = self.facts.program
        products = [op for op in program.running if program.nests[program.nest[op]].flops > 0]
        if not products:
            return self._at_rest()
        largest = max(products, key=lambda op: program.nests[int(program.nest[op])].flops * program.trips[op])
        assigned = program.assignments[program.assignment[largest]]
        groups: dict[str, list[int]] = {}
        for a in self.used:
            if assigned[a] >= 0:
                groups.setdefault(self._product_split(largest, a), []).append(a)
        split = [self._say("other", axes, 1.0, f"{how} split ×{{n}} over {{over}}") for how, axes in groups.items()]
        return split or [VerdictPart("none", (), 1, 1.0, "nothing is split: every device does the same work")]

    def _at_rest(self) -> Iterable[VerdictPart]:
        """A program without products: as its arguments are split."""
        split = {axis for tensor in self.tensors for axes in tensor.spec for axis in axes}
        data = [a for a in self.used if self.facts.names[a] in self.at_rest]
        rest = [a for a in self.used if self.facts.names[a] in split and a not in data]
        if data:
            yield self._say("data", data, 1.0, "data parallel ×{n} over {over}")
        if rest:
            yield self._say("other", rest, 1.0, "arguments split ×{n} over {over}")
        if not split:
            yield VerdictPart("none", (), 1, 1.0, "nothing is split: every device does the same work")

    def _product_split(self, op: int, axis: int) -> str:
        """What an axis splits of a product, in words: the rows or columns of the result, what is summed, or a batch."""
        program = self.facts.program
        nest, loop = program.nests[program.nest[op]], program.assignments[program.assignment[op]][axis]
        left, *others = (any(loop in dim for dim in dims) for dims in nest.operands)
        name = "convolution" if program.labels[program.label[op]].endswith("conv_general_dilated") else "product"
        if not any(loop in dim for dims in nest.results for dim in dims):
            return f"the summed dim of the largest {name}"
        if left and any(others):
            return f"the batch of the largest {name}"
        return f"the {'rows' if left else 'columns'} of the largest {name}"


def facts_have_work(facts: AxisFacts) -> bool:
    """Whether there is any product of a parameter with activations."""
    return any(use.flops for use in facts.uses)


def _flops(use: Use) -> float:
    return use.flops
