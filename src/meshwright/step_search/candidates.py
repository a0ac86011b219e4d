"""The best plan of one program, as simulated: of the search's own, and of the named methods it must not be slower than.

The solver adds compute and communication up; in a step, much communication runs beside compute. So the loop is closed:
solve, simulate, price the communication that can be hidden at the part of its time in which compute waits for it, solve
again. The plan that is quickest as simulated is kept, or a simpler one that is nearly as quick.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from meshwright.errors import ShardingError
from meshwright.hardware import Mesh
from meshwright.planner.budget import Budget
from meshwright.planner.methods import NAMED, Auto, DataParallel, Method, Zero
from meshwright.planner.planner import Progress, Task
from meshwright.planner.pricing.formulation import Exposure
from meshwright.plans.plan import Considered, PlanData
from meshwright.simulator.hidden import hidden_shares
from meshwright.simulator.simulate import simulate
from meshwright.simulator.simulated_step import SimulatedStep
from meshwright.simulator.spmd import FETCH
from meshwright.simulator.work import GRADIENTS
from meshwright.step_search.microbatches import computes_all_the_time
from meshwright.step_search.ranking import simplest, with_step

# What is fetched and reduced is priced at least at this part of its time, so that of two plans that hide everything the
# one that sends less is taken.
_LEAST = 0.02
_HIDDEN = Exposure(_LEAST, _LEAST)
_SAME = 0.05  # by less than this, a part of a time is as it was: prices are not worth another solve


def best_plan(task: Task, meshes: list[Mesh], say: Progress, budget: Budget, fewer: PlanData | None = None) -> PlanData:
    """The best plan of a program on any of some meshes.

    Args:
        task: The program.
        meshes: The meshes to try.
        say: Called with each stage.
        budget: The time that is left.
        fewer: The best plan in fewer microbatches. Where one by the communication that is exposed in that is no
            quicker, it is returned, and nothing else is looked for.
    """
    if fewer is not None and isinstance(task.method, Auto) and fewer.cost.step:
        alike = with_step(task.plan(meshes, say, budget, exposure_of([simulate(fewer)])))
        if alike.step_s >= fewer.step_s:
            return alike
        budget = budget.of_another_program()
    first = task.plan(meshes, say, budget)
    is_simple = meshes[0].cluster is None or meshes[0].num_devices == 1 or meshes[0].is_cpu  # nothing beside compute
    if not isinstance(task.method, Auto) or is_simple:
        return first
    steps: list[SimulatedStep] = []
    plans: list[PlanData] = []

    def none_is_quicker() -> bool:
        return any(map(computes_all_the_time, plans))

    for plan in chain([first], _named(task, meshes, say, budget, none_is_quicker)):
        steps.append(simulate(plan))
        plans.append(with_step(plan, steps[-1]))
    if not none_is_quicker():
        plans += _repriced(task, _worth_solving(meshes, first), exposure_of(steps), say, budget)
    chosen = simplest(plans)
    return replace(chosen, method=task.method.name, considered=_considered(first, chosen))


def _named(
    task: Task, meshes: Sequence[Mesh], say: Progress, budget: Budget, none_is_quicker: Callable[[], bool]
) -> Iterator[PlanData]:
    """The plans of named methods, each on its own view; on a mesh that was given, on that.

    Where none is quicker than those known, data parallel ones may still be simpler.
    """
    if type(task.method) is not Auto or task.method.fix:
        return
    cluster = meshes[0].cluster
    assert cluster is not None
    own_views = task.method.mesh_shapes is None and len(meshes) > 1
    hosts = cluster.num_hosts > 1 and cluster.devices_per_host > 1
    for named in (*NAMED, *([Zero(3, group=cluster.devices_per_host)] if hosts else [])):
        method = replace(named, memory_fraction=task.method.memory_fraction, seconds=task.method.seconds)
        if budget.seconds is not None and budget.is_over:
            return
        if not method.spreads_batch and none_is_quicker():
            continue
        try:
            views = method.divided(task.graph, method.meshes(cluster)) if own_views else list(meshes)
            if _may_fit(task, method, views):
                say(f"planning by {method.name} to compare")
                plan = task.by(method).plan_if_any(views, budget.of_another_program())
                yield from [] if plan is None else [plan]
        except ShardingError:  # the batch or the mesh do not allow what it fixes
            continue


def _may_fit(task: Task, method: Method, meshes: Iterable[Mesh]) -> bool:
    """Whether what a method keeps whole on every device may fit: a bound that needs no problem."""
    whole: tuple[int, ...] = ()
    if isinstance(method, DataParallel):
        whole = (*task.roles.parameters, *task.roles.optimizer)
    elif isinstance(method, Zero) and method.stage < 3:
        whole = tuple(task.roles.parameters)
    size = float(task.graph.num_bytes[list(whole)].sum())
    return any((limit := task.limit(mesh)) is None or size <= limit for mesh in meshes)


def _worth_solving(meshes: Sequence[Mesh], first: PlanData) -> list[Mesh]:
    """The views that are solved again: that of the first plan, and those that follow the machines."""
    cluster = first.mesh.cluster
    assert cluster is not None
    machines = ((cluster.num_devices,), (cluster.num_hosts, cluster.devices_per_host), first.mesh.sizes)
    return [mesh for mesh in meshes if mesh.sizes in machines]


def _repriced(task: Task, meshes: list[Mesh], exposure: Exposure, say: Progress, budget: Budget) -> Iterator[PlanData]:
    """Plans by the prices of exposed communication, until these prices are those of the plan that they lead to."""
    for _ in range(2):
        if budget.seconds is not None and budget.is_over:
            return
        say("solving again by the communication that compute waits for")
        plan = task.plan(meshes, lambda _: None, budget.of_another_program(), exposure)
        step = simulate(plan)
        yield with_step(plan, step)
        found = exposure_of([step], exposure)
        if abs(found.fetches - exposure.fetches) < _SAME and abs(found.gradients - exposure.gradients) < _SAME:
            return
        exposure = found


def exposure_of(steps: Iterable[SimulatedStep], known: Exposure = _HIDDEN) -> Exposure:
    """The part of their time in which compute waits for fetches and for reductions of gradients, in the best of steps.

    Args:
        steps: Simulated steps of one program.
        known: What is taken of those of which the steps have none.
    """
    least = {}
    for lane, before in ((FETCH, known.fetches), (GRADIENTS, known.gradients)):
        parts = [part for step in steps if (part := _exposed(step, lane)) is not None]
        least[lane] = max(_LEAST, min(parts, default=before))
    return Exposure(least[FETCH], least[GRADIENTS])


def _exposed(step: SimulatedStep, lane: str) -> float | None:
    """The part of a lane's time in which the device does not compute; None where nothing is sent on it."""
    runs = [one.run for stage in step.stages for one in stage.passes]
    found = [
        (span.end_s - span.start_s, share)
        for run in runs
        for span, share in hidden_shares(run)
        if span.task.lane == lane
    ]
    whole = sum(seconds for seconds, _ in found)
    return sum(seconds * (1.0 - share) for seconds, share in found) / whole if whole > 0 else None


def _considered(first: PlanData, chosen: PlanData) -> tuple[Considered, ...]:
    """The views that were considered, that of the chosen plan with its own cost."""
    mine = {one.shape: one for one in chosen.considered if one.shape == chosen.mesh.sizes}
    told = [mine.pop(one.shape, one) for one in first.considered]
    return (*told, *mine.values())
