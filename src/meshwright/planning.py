"""`mw.plan`: traces a function, plans it as one program or in stages, and returns the plan."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from meshwright.errors import DoesNotFit, ShardingError
from meshwright.facade import Plan
from meshwright.graph import Traced, trace
from meshwright.graph.tracing.garbage import heap_frozen
from meshwright.graph.tracing.planned_mesh import planned
from meshwright.hardware import Cluster, Mesh
from meshwright.hardware.axes import Shape
from meshwright.pipeline.planner import plan_stages, plan_stages_again
from meshwright.pipeline.search.equal_stages import ThreeD
from meshwright.plan_files.known_plans import PlanKey, plan_key
from meshwright.planner.budget import Budget
from meshwright.planner.method_names import find_method
from meshwright.planner.methods import AUTO, Auto, Method
from meshwright.planner.planner import Progress, Task
from meshwright.planner.pricing.corrections import Corrections
from meshwright.planner.pricing.user_shardings import names_axes, refuse_stages
from meshwright.planner.tasks import Tasks
from meshwright.plans.plan import PlanData
from meshwright.profiler import cluster as find_cluster
from meshwright.progress import progress
from meshwright.rehearsal.learning.calibration import calibrated, known_efficiencies
from meshwright.rehearsal.memory import known_memory, memory_digest
from meshwright.runtime.stages.pipeline_program import why_not_cut
from meshwright.step_search.bound import with_bound
from meshwright.step_search.candidates import best_plan
from meshwright.step_search.last_plan import (
    as_before,
    is_as_quick,
    is_of_others,
    methods_as_before,
    num_devices,
    other_recipe,
)
from meshwright.step_search.microbatches import batch_argnums
from meshwright.step_search.ranking import with_step
from meshwright.step_search.recomputation import decided, may_use_host
from meshwright.step_search.stages import or_stages


def plan(
    function: Callable[..., Any],
    *args: Any,
    cluster: Cluster | str | None = None,
    mesh: Mesh | Shape | None = None,
    method: Method | str | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    on_progress: Progress | None = None,
) -> Plan:
    """Finds how to split a function's tensors over a cluster.

    Args:
        function: An ordinary single-device JAX function: a train step, a forward pass.
        *args: Its arguments: pytrees of arrays or `jax.ShapeDtypeStruct`; nothing is computed or allocated. Leaves that
            are not arrays (functions, strings) are kept as they are, and so are Python numbers, switches first, where
            the function's own Python code reads them; the plan is then for these values.
        cluster: A `Cluster` or what `mw.cluster` takes; the local devices if neither this nor a mesh is given.
        mesh: One logical mesh, or its shape on the cluster, instead of all views of the cluster: ``(4, 8)``, or with
            names ``{"data": 4, "model": 8}``, or a JAX mesh. Shardings that the function itself asks for are honoured
            on a mesh that has their axes: see ``docs/guides/own-shardings.md``.
        method: A method or its short name, such as ``"zero3"``; `Auto` by default.
        batch_argnums: Positions of the arguments whose leaves are examples stacked along their first dim, which may be
            cut into microbatches: by default the first that is neither state nor parameters.
        on_progress: Called with a sentence on each stage; else a line on stderr shows it (`progress.py`).

    Returns:
        The plan.

    Raises:
        TraceError: JAX could not trace the function.
        DoesNotFit: No plan fits the memory, with any number of microbatches; it names the least memory that suffices.
        ShardingError: The shapes or the mesh do not allow a method or a fixed sharding.

    Examples:
        >>> import jax, meshwright as mw
        >>> x, w = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
        >>> plan = mw.plan(lambda x, w: x @ w, x, w, cluster="1x8 h100")
        >>> plan.mesh.num_devices, str(plan.solution.status)
        (8, 'optimal')
    """
    method = find_method(method)
    budget = Budget(method.seconds)
    with progress(on_progress) as say:
        where = _machines(cluster, mesh) if method.staged else _meshes(cluster, mesh, method)
        say("tracing")
        machines = where if isinstance(where, Cluster) else where[0].cluster
        with planned(mesh):
            traced = trace(function, *args, cluster=machines)
        found = _decided(traced, where, mesh, method, batch_numbers(batch_argnums, len(args)), say, budget)
        return Plan.of(_with_asked(found, method))


def plan_traced(
    traced: Traced,
    cluster: Cluster | str | None,
    mesh: Mesh | Shape | None,
    method: Method,
    batch: Sequence[int] | None = None,
    on_progress: Progress | None = None,
    last: PlanData | None = None,
) -> Plan:
    """As `plan`, for a function that is traced already; the search starts from its last plan, for other devices."""
    where = _machines(cluster, mesh) if method.staged else _meshes(cluster, mesh, method)
    with progress(on_progress) as say:
        budget = Budget(method.seconds)
        if last is not None and mesh is None:
            cluster = where if isinstance(where, Cluster) else where[0].cluster
            if cluster is not None and is_of_others(last, cluster):
                found = _as_before(traced, cluster, method, last, batch, say, budget)
                if found is not None:
                    return Plan.of(_with_asked(found, method))
        return Plan.of(_with_asked(_decided(traced, where, mesh, method, batch, say, budget), method))


def _with_asked(plan: PlanData, method: Method) -> PlanData:
    """A plan that says which decisions about its whole step its method fixes."""
    is_recipe = isinstance(method, ThreeD)
    fixed = {
        "microbatches": is_recipe or method.microbatches != AUTO,
        "recompute": is_recipe or method.recompute != AUTO,
        "stages": not isinstance(method, Auto) or method.pipeline != AUTO,
        "splits": not isinstance(method, Auto),
    }
    asked = [name for name, is_asked in fixed.items() if is_asked]
    return replace(plan, provenance={**plan.provenance, "asked": asked}) if asked else plan


def _as_before(
    traced: Traced,
    cluster: Cluster,
    method: Method,
    last: PlanData,
    batch: Sequence[int] | None,
    say: Progress,
    budget: Budget,
) -> PlanData | None:
    """The plan that repeats what the last one decided; None where it is better to search for all of it."""
    recipe = method if isinstance(method, ThreeD) else None
    if recipe is not None and recipe.num_devices == cluster.num_devices:
        return None
    say(f"planning as for {num_devices(last)} devices before")
    for settled in [method] if last.stages else methods_as_before(traced, method, last, cluster):
        own = budget.of_another_program()
        try:
            if last.stages:
                found = with_step(
                    plan_stages_again(traced, cluster, settled, last, say, own, _known_of_stages(traced, cluster))
                )
            else:
                found = _decided(traced, settled.meshes(cluster), None, settled, batch, say, own)
        except (DoesNotFit, ShardingError):
            continue
        if recipe is None:
            return replace(found, remarks=(as_before(last), *found.remarks)) if is_as_quick(found, last) else None
        return replace(found, remarks=(other_recipe(recipe, found), *found.remarks))
    if recipe is None:
        return None
    auto = Auto(memory_fraction=method.memory_fraction, seconds=method.seconds)
    found = _decided(traced, auto.meshes(cluster), None, auto, batch, say, budget.of_another_program())
    return replace(found, remarks=(other_recipe(recipe, found), *found.remarks))


def key_of(traced: Traced, cluster: Cluster | str | None, mesh: Mesh | Shape | None, method: Method) -> PlanKey | None:
    """The name of the plan that `plan_traced` makes, for plans that are kept; None where it has none."""
    where = _machines(cluster, mesh) if method.staged else _meshes(cluster, mesh, method)
    where = _divided(traced, where, mesh, method)
    chip = where.chip if isinstance(where, Cluster) else where[0].chip
    known = {**known_efficiencies(chip)} | ({"memory": digest} if (digest := memory_digest(traced, chip)) else {})
    return plan_key(traced, method, where, known)


def batch_numbers(given: int | Sequence[int] | None, count: int) -> tuple[int, ...] | None:
    """The positions of the batch among so many arguments; None where they are not given."""
    if given is None:
        return None
    numbers = (given,) if isinstance(given, int) else tuple(given)
    for number in numbers:
        if type(number) is not int or not -count <= number < count:
            raise ShardingError(f"batch_argnums is {given!r}; give positions of the {count} arguments, from 0")
    return tuple(number % count for number in numbers)


def _decided(
    traced: Traced,
    where: Cluster | list[Mesh],
    mesh: Mesh | Shape | None,
    method: Method,
    batch: Sequence[int] | None,
    say: Progress,
    budget: Budget,
) -> PlanData:
    """The plan of a function, with as many microbatches as its method says or as are best."""
    if isinstance(where, Cluster):
        return with_step(_staged(traced, where, method, say, budget))

    solve = _Solve(where, mesh, say, budget)
    with planned(mesh):  # a step that is cut is traced again
        try:
            plan = with_bound(with_step(decided(traced, batch, method, where, solve, say)))
        except DoesNotFit as error:
            cluster = where[0].cluster if mesh is None else None
            found = None if cluster is None else _instead(traced, cluster, method, batch, say, budget)
            if found is None and may_use_host(method, where[0]):
                say("nothing fits the devices' memory: keeping results on the host")
                with suppress(DoesNotFit, ShardingError):
                    found = decided(traced, batch, method, where, solve, say, error.limit_bytes)
            if found is None:
                raise
            return with_bound(with_step(found))
        if mesh is not None or where[0].cluster is None:
            return plan
        positions = batch_argnums(traced) if batch is None else batch
        known, own = _known_of_stages(traced, where[0].cluster), budget.of_another_program()
        return or_stages(plan, traced, where[0].cluster, method, positions, say, own, known)


def _instead(
    traced: Traced, cluster: Cluster, method: Method, batch: Sequence[int] | None, say: Progress, budget: Budget
) -> PlanData | None:
    """A plan in stages of a train step of which no plan of one program fits; None where there is none either."""
    if not (isinstance(method, Auto) and method.may_be_staged and traced.graph.state and cluster.num_devices > 1):
        return None
    say("no plan of one program fits: looking for stages")
    try:
        found = _staged(traced, cluster, replace(method, pipeline=True), say, budget.of_another_program())
    except (DoesNotFit, ShardingError):
        return None
    if found.stages and why_not_cut(found, traced, batch_argnums(traced) if batch is None else batch):
        return None  # it would not have the numbers of one device
    return replace(found, remarks=("It runs in stages, since no plan of one program fits.", *found.remarks))


def _divided(
    traced: Traced, where: Cluster | list[Mesh], mesh: Mesh | Shape | None, method: Method
) -> Cluster | list[Mesh]:
    """The views to try, some of them divided finer for tensors that the number of devices does not divide.

    A mesh that the user gives, or whose axes the function names, stays as it is.
    """
    if isinstance(where, Cluster) or mesh is not None or names_axes(traced.graph):
        return where
    return method.divided(traced.graph, where)


class _Solve:
    """Makes plans of one program: the steps in microbatches, and with other recomputation, of one search."""

    def __init__(self, where: list[Mesh], mesh: Mesh | Shape | None, say: Progress, budget: Budget):
        self.where, self.mesh, self.say, self.budget = where, mesh, say, budget
        self.tasks = Tasks(_known_of_program)

    @heap_frozen()
    def __call__(self, traced: Traced, method: Method, limited: bool = True, fewer: PlanData | None = None) -> PlanData:
        budget = self.budget.of_another_program()
        if isinstance(method, Auto) and method.profile:
            from meshwright.rehearsal.search import MeasuredSearch  # here, since it loads what measures

            views = self._views(traced, method)
            return MeasuredSearch(traced, views, method, self.say, _known_of_program(traced, views[0])).plan()
        task, views = self.task(traced, method)
        if not limited:
            return task.unlimited().plan(views, self.say, budget)
        return best_plan(task, views, self.say, budget, fewer)

    def task(self, traced: Traced, method: Method) -> tuple[Task, list[Mesh]]:
        """What is to be planned of a step, and the meshes to try."""
        return self.tasks.of(traced, self._views(traced, method), method)

    def _views(self, traced: Traced, method: Method) -> list[Mesh]:
        cluster = self.where[0].cluster
        own = self.where if self.mesh is not None or cluster is None else method.meshes(cluster)
        views = _divided(traced, own, self.mesh, method)
        assert isinstance(views, list), "only stages have none"
        return views


def _known_of_program(traced: Traced, mesh: Mesh) -> Corrections | None:
    """What was measured of a program and of the chip."""
    factors, chip, known = known_efficiencies(mesh.chip), mesh.chip, None
    if chip is not None and factors:
        known = calibrated(traced.graph, chip, mesh.num_devices, factors)
    needed = known_memory(traced, chip)
    return replace(known or Corrections(), memory=needed.whole) if needed.whole != 1 else known


@heap_frozen()
def _staged(traced: Traced, cluster: Cluster, method: Method, say: Progress, budget: Budget) -> PlanData:
    refuse_stages(traced.graph)
    return plan_stages(traced, cluster, method, say, budget, _known_of_stages(traced, cluster))


def _known_of_stages(traced: Traced, cluster: Cluster) -> Corrections:
    """What is known of a program's memory, for pipelines and for the plans of one program beside them."""
    needed = known_memory(traced, None if cluster.mixed else cluster.chip)
    return Corrections(memory=needed.whole, stages_memory=needed.stages)


def _machines(cluster: Cluster | str | None, mesh: object) -> Cluster:
    if mesh is not None:
        raise ShardingError("a pipeline gives each stage a mesh of its own; give a cluster, and leave mesh out")
    return cluster if isinstance(cluster, Cluster) else find_cluster("local" if cluster is None else cluster)


def _meshes(cluster: Cluster | str | None, mesh: Mesh | Shape | None, method: Method) -> list[Mesh]:
    if isinstance(mesh, Mesh):
        return [mesh]
    machine = _machines(cluster, None)
    return [machine.mesh(mesh)] if mesh is not None else method.meshes(machine)
