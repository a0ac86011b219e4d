"""Decides what the backward pass computes again, with the microbatches: the least work that the memory allows.

Work that is repeated and microbatches both save memory, so each policy is planned with the microbatches that it needs.
Policies are tried from the least work to the least memory, and only as far as a plan is short of memory; the quickest
plan as simulated is kept, and of those nearly as quick the simplest.
"""

from collections.abc import Callable, Sequence

from meshwright.errors import DoesNotFit, ShardingError
from meshwright.graph import Traced
from meshwright.graph.phases import BACKWARD, PHASES
from meshwright.hardware import Mesh
from meshwright.planner.methods import AUTO, Auto, Method, Zero
from meshwright.planner.planner import Progress
from meshwright.plans.plan import PlanData
from meshwright.runtime.microbatches.planned_parts import recomputing
from meshwright.runtime.recomputation.policies import AS_WRITTEN, FULL, NONE, SELECTIVE
from meshwright.step_search import microbatches
from meshwright.step_search.ranking import simplest, with_step


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
        return planned(method.recompute)
    words: Sequence[str] = _words(traced, method)
    cluster = meshes[0].cluster
    if len(words) > 1 and microbatches.is_free(method) and cluster is not None and cluster.num_devices > 1:
        words = _ranked(words, method, planned, say)
    return _best(words, planned, say)


def _ranked(words: Sequence[str], method: Method, planned: Callable[..., PlanData], say: Progress) -> Sequence[str]:
    """The policies to plan with a free search, which takes far longer than fully sharded data parallelism does.

    Where that is not short of memory without recomputation, nothing else need be searched; else only the policy with
    which it is quickest.
    """
    fsdp = Zero(3, memory_fraction=method.memory_fraction, seconds=method.seconds, microbatches=method.microbatches)
    times: dict[str, float] = {}
    for word in words:
        say(f"fully sharded data parallelism, recomputation {word}")
        try:
            plan = planned(word, fsdp)
        except DoesNotFit:
            continue
        except ShardingError:  # the batch does not divide into as many parts as there are devices
            return words
        times[word] = with_step(plan).step_s
        if not microbatches.is_short_of_memory(plan):
            break
    return sorted(times, key=lambda word: times[word])[:1] or words


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
