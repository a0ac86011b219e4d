"""The kind of each tensor: its part in the parallelism, in a few words.

The kind of an axis that splits a parameter follows from the products with the parameter (`axis_uses.py`): ``tensor
(column)``, ``tensor (row)``, ``expert``, ``vocabulary``. Where most of the work is done with the parameter whole along
that axis, it is gathered before use: ``zero``. Optimizer state has the kind of its parameter; an axis that splits the
state alone is ``zero``, too. A parameter that no axis splits is ``replicated (data parallel)`` where some axis splits
the batch, else ``replicated``.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.parallelism.axis_uses import AxisFacts

if TYPE_CHECKING:
    from meshwright.plans.plan import Tensor

_WORDS = {"column": "tensor (column)", "row": "tensor (row)", "expert": "expert", "vocabulary": "vocabulary"}
_WORDS |= {"batch": "data", "other": "split"}
ZERO = "zero"


class Kinds:
    """Kinds of a plan's tensors.

    Args:
        facts: What the axes do.
    """

    def __init__(self, facts: AxisFacts):
        self.facts = facts
        self._by_axis: dict[tuple[int, int], Counter[str]] = {}  # of a parameter and an axis: the parts in its products
        self._by_class: dict[tuple[int, int], Counter[str]] = {}  # of a dim's class and an axis
        self._work: Counter[tuple[int, int]] = Counter()
        batch: Counter[int] = Counter()
        for use in facts.uses:
            weight = int(use.flops) + 1
            if use.part == "batch":
                batch[use.axis] += weight
            self._work[use.parameter, use.axis] += weight
            if use.dim >= 0:
                self._by_axis.setdefault((use.parameter, use.axis), Counter())[use.part] += weight
                self._by_class.setdefault((use.dim_class, use.axis), Counter())[use.part] += weight
        self.data_axes = tuple(name for a, name in enumerate(facts.names) if batch[a])
        self._used = {use.parameter for use in facts.uses}

    def parts(self, value: int, spec: Sequence[Sequence[str]]) -> dict[str, str]:
        """For each axis that splits a parameter or optimizer state, the part it plays."""
        facts, owner = self.facts, self.facts.owner(value)
        played = {}
        for dim, axes in enumerate(spec):
            for name in axes:
                axis = facts.names.index(name)
                shared = owner == value or name in self._spec(owner)[dim]
                played[name] = self._part(owner, dim, axis) if shared else ZERO
        return played

    def _part(self, parameter: int, dim: int, axis: int) -> str:
        seen = self._by_axis.get((parameter, axis))
        if seen is not None and 2 * seen.total() < self._work[parameter, axis]:
            return ZERO  # some operations read it split, but most of the work is done with it gathered
        if seen is None and parameter not in self._used and self.facts.is_kept(parameter, dim, axis):
            # A bias or norm: it is split as the features it meets are split.
            seen = self._by_class.get((self.facts.classes.of(parameter)[dim], axis), Counter({"column": 1}))
        return seen.most_common(1)[0][0] if seen else ZERO

    def _spec(self, value: int) -> Sequence[Sequence[str]]:
        return self.facts.spec_of(value, int(self.facts.program.code[value]))

    def kind(self, tensor: "Tensor") -> str:
        """The kind of an argument or result, in words."""
        split = [axis for axes in tensor.spec for axis in axes]
        value = self.facts.values.get(tensor.path)
        if value is None or tensor.role not in ("parameters", "optimizer"):
            return self._activation(tensor, value)
        if not split:
            return "replicated (data parallel)" if self.data_axes else "replicated"
        parts = self.parts(value, tensor.spec)
        words = dict.fromkeys(_WORDS[part] for part in parts.values() if part != ZERO)
        gathered = [axis for axis, part in parts.items() if part == ZERO]
        if gathered:
            over = "data" if set(gathered) <= set(self.data_axes) else ", ".join(gathered)
            words[f"{ZERO} (sharded over {over})"] = None
        return " + ".join(words)

    def _activation(self, tensor: "Tensor", value: int | None) -> str:
        words = []
        classes = self.facts.classes.of(value) if value is not None else [-1] * len(tensor.spec)
        for dim_class, axes in zip(classes, tensor.spec, strict=True):
            if axes:
                word = "data" if dim_class in self.facts.batch else ""
                word = word or ("sequence" if dim_class in self.facts.sequence else "")
                words.append(f"{word or 'split'} ({'split ' if word else ''}over {', '.join(axes)})")
        return " + ".join(words) or "replicated"
