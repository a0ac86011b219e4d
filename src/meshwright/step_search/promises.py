"""What policies of recomputation are expected to take with so many microbatches; plans that are made correct it."""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.parallelism.words import recomputed_words
from meshwright.plans.plan import PlanData
from meshwright.step_search.keeping import Keeping, Kept
from meshwright.units import format_bytes

_GAIN = 0.002  # part of a step: a promise of less is not looked into
_LEAST_FREED = 0.25  # of what layers keep less, as two plans that do not fit tell: a smaller part is chance
_SIMPLER = 0.003  # part of a step that one level for all layers, which has a name, may take longer


class Promise(NamedTuple):
    """What is expected of a policy with some microbatches."""

    step_s: float
    num_parts: int
    kept: Kept


class Promises:
    """What policies are expected to take, by number of microbatches; plans correct it.

    Args:
        keeping: What the layers may keep.
        reference: The plan without recomputation, microbatches or a memory limit.
        counts: The numbers of microbatches.
        limit: Bytes that a plan may take.
        whole: A plan without recomputation that fits; None where none does.
    """

    def __init__(
        self,
        keeping: Keeping,
        reference: PlanData,
        counts: Sequence[int],
        limit: float,
        whole: PlanData | None,
    ):
        self.keeping, self.reference, self.limit, self.whole = keeping, reference, limit, whole
        self.everything = keeping.everything
        self.counts = list(counts)
        self.tried: dict[tuple[int, str], Kept] = {}
        self.room = {count: limit - self._rest(count) for count in counts}  # for what layers keep
        self.each_s = 0.0  # what a microbatch more takes
        self.late_s = dict.fromkeys(counts, 0.0)  # by which plans took longer than was expected
        self.latest: dict[int, tuple[float, float]] = {}  # by number: bytes kept, and the peak, of the latest misfit
        self.quickest = float("inf")
        if whole is not None and whole.microbatches > 1:
            self._learn(whole)

    def next(self) -> Promise | None:
        """The quickest promise that was not looked into; None where none is quicker than the best plan."""
        promises = [promise for count in self.counts if (promise := self._promise(count)) is not None]
        promises = [one for one in promises if (one.num_parts, one.kept.policy) not in self.tried]
        best = min(promises, default=None, key=lambda one: (one.step_s, one.num_parts))
        return best if best is not None and best.step_s < (1 - _GAIN) * self.quickest else None

    def learn(self, promise: Promise, peak_bytes: float, step_s: float | None = None) -> None:
        """Corrects what is expected by what a promise takes, and its time where it fits."""
        count, kept = promise.num_parts, promise.kept
        num_bytes, spare = kept.num_bytes / count, self.limit - peak_bytes
        self.tried[count, kept.policy] = kept
        self.room[count] = num_bytes + (spare if spare >= 0 else spare / self._freed(count, num_bytes, peak_bytes))
        if step_s is not None:
            self.late_s[count] += step_s - promise.step_s
            self.quickest = min(self.quickest, step_s)

    def _freed(self, count: int, num_bytes: float, peak_bytes: float) -> float:
        """The part of what layers keep less by which the peak falls: what is computed again is held for a while."""
        before, self.latest[count] = self.latest.get(count), (num_bytes, peak_bytes)
        if before is None or before[0] == num_bytes:
            return 1.0
        slope = (before[1] - peak_bytes) / (before[0] - num_bytes)
        return min(max(slope, _LEAST_FREED), 1.0)

    def _learn(self, whole: PlanData) -> None:
        """What a plan without recomputation takes that fits."""
        self.quickest = whole.step_s
        self.each_s = max(whole.step_s - self.reference.step_s, 0.0) / (whole.microbatches - 1)
        expected = self._rest(whole.microbatches) + self.everything.num_bytes / whole.microbatches
        error = expected - whole.memory.peak_bytes
        self.room.update((count, room + error) for count, room in self.room.items() if count > 1)

    def remarks(self, plan: PlanData) -> tuple[str, ...]:
        """What recomputation saves and costs in a plan."""
        kept = self.tried.get((plan.microbatches, plan.recompute))
        if kept is None:
            return ()
        saved = (self.everything.num_bytes - kept.num_bytes) / plan.microbatches
        what = recomputed_words(kept.policy)
        said = f"{what[:1].upper()}{what[1:]}: that saves {format_bytes(saved)} on each device"
        said += f" and costs {kept.seconds / plan.step_s:.1%} of the step"
        if self.whole is None:
            return (f"{said}; without it no plan of {plan.method} fits that keeps all devices at work.",)
        whole = self.whole
        count = f"{whole.microbatches} microbatches instead of {plan.microbatches}"
        return (f"{said}; without it {count}, {whole.step_s / plan.step_s - 1:+.1%} ({plan.method}, as simulated).",)

    def _promise(self, count: int) -> Promise | None:
        room = self.room[count] * count
        kept = self.keeping.within(room)
        if kept is None:
            return None
        step_s = self.reference.step_s + (count - 1) * self.each_s + self.late_s[count]
        simple = [one for one in self.keeping.uniform if one.num_bytes <= room]
        simple = [one for one in simple if one.seconds - kept.seconds <= _SIMPLER * step_s]
        kept = min(simple, key=lambda one: one.seconds, default=kept)
        return Promise(step_s + kept.seconds, count, kept)

    def _rest(self, count: int) -> float:
        """About the bytes that a plan takes besides what layers keep: the state, gradients, and the rest of a part."""
        memory = self.reference.memory
        state = sum(size for role, size in memory.argument_bytes.items() if role != "data")
        state += memory.argument_bytes.get("parameters", 0) * (count > 1)  # gradients are added up
        return state + max(memory.peak_bytes - self.everything.num_bytes - state, 0.0) / count
