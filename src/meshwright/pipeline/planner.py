"""Plans a function in stages: trace, find layers, search pipelines, compare with one program on all devices."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np

from meshwright.errors import DoesNotFit, ShardingError
from meshwright.graph import Traced
from meshwright.hardware import Cluster
from meshwright.jit import clock
from meshwright.pipeline.layers.batch_sizes import ResizableBatch
from meshwright.pipeline.layers.forward_pass import Flow
from meshwright.pipeline.layers.layers import Layers, Wishes, find_layers
from meshwright.pipeline.prices.catalogue import Catalogue
from meshwright.pipeline.prices.kernels import least_peak
from meshwright.pipeline.search.device_line import Line, orders
from meshwright.pipeline.search.equal_stages import ThreeD
from meshwright.pipeline.search.refine import refine
from meshwright.pipeline.search.search import PipelineSearch
from meshwright.pipeline.to_plan import describe
from meshwright.planner.budget import Budget
from meshwright.planner.grouping.groups import Grouping
from meshwright.planner.grouping.roles import find_roles
from meshwright.planner.methods import Auto, Method
from meshwright.planner.planner import Task
from meshwright.planner.pricing.corrections import UNCORRECTED, Corrections
from meshwright.plans.plan import PlanData
from meshwright.plans.stage_instructions import stage_instructions
from meshwright.schedules import in_flight
from meshwright.schedules.order import proven_order

Progress = Callable[[str], None]

_FEW_KINDS = 3  # kinds of hosts up to which any subset may be left idle
_EQUAL = 1 + 1e-9  # one stage with one microbatch is the same plan; its costs are summed in another order


def plan_stages(
    traced: Traced,
    cluster: Cluster,
    method: Method,
    say: Progress,
    budget: Budget | None = None,
    known: Corrections = UNCORRECTED,
) -> PlanData:
    """The best plan that a method allows, with stages unless one program over all devices is quicker.

    Args:
        traced: The function, traced.
        cluster: The machines.
        method: `Auto` with ``pipeline=True``, or `ThreeD`.
        say: Called with a description of each step.
        budget: The time for it; None takes the method's.
        known: What is known of the program's memory.

    Raises:
        DoesNotFit: No pipeline fits the memory.
        ShardingError: The model, the batch or the cluster does not allow the method, or stages would wait for ever.
    """
    budget = budget or Budget(method.seconds)
    whole, started = start_search(traced, cluster, method, say, budget, known), clock()
    if isinstance(method, ThreeD):
        whole.one_recipe(method)
        if whole.best is None:
            raise whole.does_not_fit()
        best, plain = whole, None
    else:
        task = Task(traced, Auto(memory_fraction=method.memory_fraction, seconds=method.seconds), corrections=known)
        best, plain = _search(task, whole, say)
    say("writing the stages down")
    plan = plain or describe(best, traced, method, clock() - started)
    if plan.stages:
        proven_order(stage_instructions(plan))
    return replace(plan, method=method.name, provenance={**plan.provenance, **_idle(cluster, best)})


def plan_stages_again(
    traced: Traced,
    cluster: Cluster,
    method: Method,
    last: PlanData,
    say: Progress,
    budget: Budget,
    known: Corrections = UNCORRECTED,
) -> PlanData:
    """The best pipeline of equal stages, with the recomputation of the last plan and microbatches of about its size.

    Args:
        traced: The function, traced.
        cluster: The machines, other than those of the last plan.
        method: The method by which the last plan was made.
        last: The last plan, which has stages.
        say: Called with a description of each step.
        budget: The time for it.
        known: As in `plan_stages`.

    Raises:
        DoesNotFit: No such pipeline fits the memory.
        ShardingError: The model, the batch or the cluster allows none.
    """
    assert isinstance(method, Auto | ThreeD) and last.pipeline is not None
    wishes = Auto(
        pipeline=True, layers=method.layers, boundaries=method.boundaries, memory_fraction=method.memory_fraction
    )
    search, started = start_search(traced, cluster, wishes, say, budget, known), clock()
    search.only_like(last.pipeline)
    search.all_recipes()
    if isinstance(method, Auto):
        refine(search)
    if search.best is None:
        raise search.does_not_fit()
    plan = describe(search, traced, method, clock() - started)
    return replace(plan, method=method.name)


def _search(task: Task, whole: PipelineSearch, say: Progress) -> tuple[PipelineSearch, PlanData | None]:
    """The search that found the best pipeline, and the plan without stages, of the task, if that is quicker.

    Where hosts are of several kinds, it may be quicker to leave some kinds idle.

    Raises:
        DoesNotFit: Nothing fits.
    """
    best, plain, best_s, bound_s = None, None, np.inf, np.inf
    for search in (whole, *_parts(whole)):
        search.beat_s = best_s
        search.all_recipes()
        search.all_programmes()
        refine(search)
        found = _plain(task, search, say)
        if found is not None and found.step_s <= search.best_s * _EQUAL:
            best, plain, best_s = search, found, found.step_s
        elif search.best is not None:
            best, plain, best_s = search, None, search.best_s
        bound_s = min(bound_s, search.bound_s)
    if best is None:
        note_nearest(whole)
        raise whole.does_not_fit()
    best.note_bound(bound_s)
    return best, plain


def _parts(whole: PipelineSearch) -> Iterator[PipelineSearch]:
    """The same search on some kinds of hosts alone: on any of up to three kinds, on one of more."""
    groups = range(len(whole.catalogue.cluster.groups))
    sizes = groups[1:] if len(groups) <= _FEW_KINDS else groups[1:2]
    for size in reversed(sizes):
        for part in combinations(groups, size):
            yield PipelineSearch(whole.catalogue.part(part), whole.flow, whole.say, budget=whole.budget)


def _idle(cluster: Cluster, search: PipelineSearch) -> dict[str, str]:
    """A remark on the hosts that a plan leaves idle."""
    all_names, used = (Counter(group.name for group in some.groups) for some in (cluster, search.catalogue.cluster))
    left = [*(all_names - used).elements()]
    return {"idle": f"{' and '.join(left)}: quicker without"} if left else {}


def cut_layers(traced: Traced, method: Method, say: Progress) -> tuple[Flow, Layers]:
    """The forward pass of a function, and its layers.

    Raises:
        ShardingError: It has none, or not those that the method asks for.
    """
    graph = traced.graph
    flow = Flow(graph, Grouping(graph).nests, find_roles(graph))
    say("finding layers")
    assert isinstance(method, Auto | ThreeD)
    return flow, find_layers(flow, Wishes(method.layers, method.boundaries))


def start_search(
    traced: Traced,
    cluster: Cluster,
    method: Method,
    say: Progress,
    budget: Budget | None = None,
    known: Corrections = UNCORRECTED,
    layers: tuple[Flow, Layers] | None = None,
) -> PipelineSearch:
    """A search with all of its inputs, before any searching; its layers may be known by now."""
    flow, layers_ = cut_layers(traced, method, say) if layers is None else layers
    say("tracing with another batch")
    rows = ResizableBatch(traced)
    if isinstance(method, ThreeD) and not rows.resizes and method.microbatch * method.data < rows.batch:
        raise ShardingError(
            f"{method.name}: the function cannot be traced alike with another batch than its {rows.batch} rows, so it "
            f"cannot be cut into microbatches; use microbatch={rows.batch // method.data}"
        )
    catalogue = Catalogue(rows, layers_, cluster, method.memory_fraction, say, known.stages_memory)
    return PipelineSearch(catalogue.unpruned() if isinstance(method, ThreeD) else catalogue, flow, say, budget=budget)


def _plain(task: Task, search: PipelineSearch, say: Progress) -> PlanData | None:
    """The best plan without stages; None where there is none."""
    cluster = search.catalogue.cluster
    if cluster.mixed:
        return None
    meshes = task.method.meshes(cluster)
    if search.best_s < np.inf and not any(task.can_fit(mesh) for mesh in meshes):
        return None
    try:
        plan = task.plan(meshes, say, search.budget if task.method.seconds is not None else None)
        search.note_bound(plan.solution.lower_bound)
        return plan
    except DoesNotFit as error:
        search.note_misfit(error.needed_bytes / search.catalogue.needed, "one program over all devices")
    except ShardingError:  # sizes that no mesh divides
        say("no plan without stages")
    return None


def note_nearest(search: PipelineSearch) -> None:
    """Finds the stages whose fullest needs least memory; where hosts differ, as a fraction of the device's memory.

    More rows of a microbatch need more memory, unless they divide among more replicas.
    """
    search.say("looking for the least memory that suffices")
    thorough = PipelineSearch(search.catalogue.unpruned(), search.flow, search.say)
    cluster, sizes = search.catalogue.cluster, search.catalogue.microbatches
    few = [n for n in sizes if n <= max(group.num_devices for group in cluster.groups)] or sizes[:1]
    for rows in few:
        for checkpoint in search.checkpoints:
            for order in orders(len(cluster.groups)):
                need, stages = _least(thorough, rows, checkpoint, Line(cluster, order))
                words = f"of {stages} stages with checkpoint={checkpoint}"
                search.note_misfit(need * min(search.catalogue.limits), words)


def _least(search: PipelineSearch, rows: int, checkpoint: str, line: Line) -> tuple[float, int]:
    """The least need of the fullest stage, as a fraction of its memory, and the number of stages."""
    tried = [(g, n, search.options(g, n, rows, checkpoint)) for g, n in line.kinds]
    found = [(g, n, options) for g, n, options in tried if options is not None]
    if not found:
        return np.inf, 0
    most = min(search.num_layers, line.num_units)
    schedule = "1f1b" if search.trains else "inference"  # these hold no more than any other schedule
    held = in_flight(schedule, most, search.catalogue.rows.batch // rows)[::-1]
    need = np.array([options.least_bytes(max(held)) / options.limit for _, _, options in found])
    size = np.array([n // line.unit for _, n, _ in found])
    allowed = np.array([line.allowed(g, n) for g, n, _ in found])
    by_number = least_peak(need, size, allowed, np.array(held))
    return float(by_number.min()), int(by_number.argmin())
