"""Decides what the backward pass computes again, with the microbatches: the least work that the memory allows.

Work that is repeated and microbatches both save memory, so each policy is planned with the microbatches that it needs.
Policies are tried from the least work to the least memory, and only as far as a plan is short of memory; the quickest
plan as simulated is kept, and of those nearly as quick the simplest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from meshwright.errors import DoesNotFit, ShardingError
from meshwright.graph import Traced
from meshwright.graph.phases import BACKWARD, PHASES
from meshwright.hardware import Mesh
from meshwright.parallelism.words import recomputed_words
from meshwright.planner.methods import AUTO, Auto, Method, Zero
from meshwright.planner.planner import Progress
from meshwright.plans.plan import PlanData
from meshwright.runtime.microbatches.planned_parts import recomputing
from meshwright.runtime.recomputation.policies import ALTERNATE, AS_WRITTEN, FULL, NONE, SELECTIVE
from meshwright.step_search import microbatches
from meshwright.step_search.ranking import simplest, with_step
from meshwright.units import format_bytes

#: Policies with a little less work than others, and a little more memory.
_BETWEEN = {SELECTIVE: (f"{SELECTIVE}:1/2",), FULL: (ALTERNATE, f"{FULL}:1/2")}


def decided(
    traced: Traced,
    batch: Sequence[int] | None,
    method: Method,
    meshes: Sequence[Mesh],
    solve: microbatches.Solve,
    say: Progress,
) -> PlanData:
    """The plan of a step as one program, with the recomputation and the microbatches that its method says or are best.

    Args:
        traced: The step as it was written, with its whole batch.
        batch: Positions of the arguments that are the batch; None for those that look like it.
        method: The method.
        meshes: The views that it tries.
        solve: Makes the plan of a traced step by a method.
        say: Called with each stage.

    Raises:
        DoesNotFit: No plan fits, with any recomputation and number of microbatches.
        ShardingError: The batch does not divide into as many parts as the method says.
    """

    def planned(word: str, by: Method = method) -> PlanData:
        return microbatches.decided(recomputing(traced, word), batch, by, meshes, solve, say)

    if method.recompute != AUTO:
        _check_share(method.recompute, recomputing(traced, method.recompute))
        return planned(method.recompute)
    words: Sequence[str] = _words(traced, method)
    if len(words) == 1 or not _may_be_short(traced, meshes[0]):
        return _best(words, planned, say)
    remark = ""
    cluster = meshes[0].cluster
    if microbatches.is_free(method) and cluster is not None and cluster.num_devices > 1:
        words, remark = _ranked(words, not traced.graph.loops, method, planned, say)
    plan = _best(words, planned, say)
    return replace(plan, remarks=(remark, *plan.remarks)) if remark and plan.recompute == words[0] else plan


def _check_share(word: str, traced: Traced) -> None:
    """Refuses a part of the layers where none run one after the other, of which a part could be computed again."""
    kind, colon, _ = word.partition(":")
    if colon and not any(operation.is_checkpoint for operation in traced.call.program.walk()):
        raise ShardingError(
            f"recompute is {word!r}, and this step has no layers that run one after the other: all trips of a loop are "
            f"alike; give {kind!r}"
        )


def _may_be_short(traced: Traced, mesh: Mesh) -> bool:
    """Whether memory may be short: not where all devices together could hold every value that is ever computed."""
    limit = mesh.memory_bytes
    return limit is not None and traced.graph.num_bytes.sum() > limit * mesh.num_devices


def _ranked(
    words: Sequence[str], has_layers: bool, method: Method, planned: Callable[..., PlanData], say: Progress
) -> tuple[Sequence[str], str]:
    """The policies to plan with a free search, which takes far longer than fully sharded data parallelism does.

    Where that is not short of memory without recomputation, nothing else need be searched; else only the policy with
    which it is quickest, and a remark says what it saves and costs.

    Args:
        words: The policies, from the least work to the least memory.
        has_layers: Whether the layers run one after the other, so that a part of them may be computed again.
        method: The method.
        planned: Makes a plan with a policy, by a method.
        say: Called with each stage.
    """
    fsdp = Zero(3, memory_fraction=method.memory_fraction, seconds=method.seconds, microbatches=method.microbatches)
    plans: dict[str, PlanData] = {}
    times: dict[str, float] = {}

    def is_short(word: str) -> bool:
        say(f"fully sharded data parallelism, recomputation {word}")
        try:
            plans[word] = planned(word, fsdp)
        except DoesNotFit:
            return True
        times[word] = with_step(plans[word]).step_s
        return microbatches.is_short_of_memory(plans[word])

    try:
        for word in words:
            if not is_short(word):
                break
        best = min(times, key=lambda word: times[word], default=words[0])
        for word in _BETWEEN.get(best, ()):  # a little less work than the best, where it fits
            if has_layers or ":" not in word:
                is_short(word)
    except ShardingError:  # the batch does not divide into as many parts as there are devices
        return words, ""
    if not times:
        return words, ""
    best = min(times, key=lambda word: times[word])
    return [best], "" if best == words[0] else _saving(best, plans[best], times[best], plans, times, words[0])


def _saving(
    word: str,
    plan: PlanData,
    seconds: float,
    plans: Mapping[str, PlanData],
    times: Mapping[str, float],
    least: str,
) -> str:
    """What recomputation saves and costs, as fully sharded data parallelism has it."""
    what = recomputed_words(word) or "its own checkpoints"
    if least not in plans:
        return f"Without recomputation ({what}) no plan of fully sharded data parallelism fits."
    other = plans[least]
    saved = _activations(other) / plan.microbatches - _activations(plan) / plan.microbatches
    count = f"{other.microbatches} microbatch{'es' if other.microbatches > 1 else ''} instead of {plan.microbatches}"
    return (
        f"With {what} a step takes about {format_bytes(max(saved, 0))} less on each device; without it {count}, "
        f"{times[least] / seconds - 1:+.1%}, as fully sharded data parallelism simulates it."
    )


def _activations(plan: PlanData) -> float:
    """About the bytes that a device would keep for the backward pass of the whole batch."""
    return (plan.memory.peak_bytes - sum(plan.memory.argument_bytes.values())) * plan.microbatches


def _best(words: Sequence[str], planned: Callable[..., PlanData], say: Progress) -> PlanData:
    """The quickest plan, or a simpler one that is nearly as quick; policies are tried while memory is short."""
    plans: list[PlanData] = []
    misfits: list[DoesNotFit] = []
    for word in words:
        if plans or misfits:
            say(f"looking for plans with recomputation {word}")
        try:
            plans.append(planned(word))
        except DoesNotFit as error:
            misfits.append(error)
            if plans:
                break
        else:
            if not microbatches.is_short_of_memory(plans[-1]):
                break
    if not plans:
        raise min(misfits, key=lambda error: error.needed_bytes)
    return simplest([with_step(plan) for plan in plans])


def _words(traced: Traced, method: Method) -> tuple[str, ...]:
    """The policies to try, from the least work to the least memory; a user's own checkpoints stand for the last."""
    has_backward = bool((traced.graph.columns.phase == PHASES.index(BACKWARD)).any())
    if not has_backward or (isinstance(method, Auto) and method.profile):
        return (AS_WRITTEN,)
    if any(operation.is_checkpoint for operation in traced.call.program.walk()):
        return NONE, SELECTIVE, AS_WRITTEN
    return AS_WRITTEN, SELECTIVE, FULL
