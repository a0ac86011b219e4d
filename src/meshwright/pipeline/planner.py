"""Plans a function in stages: trace, find layers, search pipelines, and hold the best against one program for all."""

import time
from collections.abc import Callable
from dataclasses import replace

from meshwright.errors import DoesNotFit, ShardingError
from meshwright.graph import Traced
from meshwright.graph.collector import heap_frozen
from meshwright.hardware import Cluster
from meshwright.pipeline.catalogue import Catalogue
from meshwright.pipeline.describe import describe
from meshwright.pipeline.flow import Flow
from meshwright.pipeline.layers import Wishes, find_layers
from meshwright.pipeline.nearest import note_nearest
from meshwright.pipeline.recipe import ThreeD
from meshwright.pipeline.rows import Rows
from meshwright.pipeline.search import Search
from meshwright.planner.groups import Grouping
from meshwright.planner.methods import Auto, Method
from meshwright.planner.plan import Plan
from meshwright.planner.planner import Task
from meshwright.planner.roles import find_roles

Progress = Callable[[str], None]

_EQUAL = 1 + 1e-9  # one stage with one microbatch is the same plan, its costs added up in another order


def plan_stages(traced: Traced, cluster: Cluster, method: Method, say: Progress) -> Plan:
    """The best plan with stages that a method allows; without, where one program over all devices is quicker.

    Args:
        traced: The function, traced.
        cluster: The machines.
        method: `Auto` with ``pipeline=True``, or `ThreeD`.
        say: Told what is being done.

    Raises:
        DoesNotFit: No pipeline fits the memory.
        ShardingError: The method asks for what the model, the batch or the cluster does not allow.
    """
    with heap_frozen():
        search, started = start_search(traced, cluster, method, say), time.perf_counter()
        if isinstance(method, ThreeD):
            search.one_recipe(method)
            plain = None
        else:
            search.all_recipes()
            search.all_programmes()
            plain = _plain(traced, search, method, say)
        if plain is not None and plain.step_s <= search.best_s * _EQUAL:
            return replace(plain, method=method.name)
        if search.best is None:
            if not isinstance(method, ThreeD):
                note_nearest(search)
            raise search.does_not_fit()
        say("writing the stages down")
        return describe(search, traced, method, time.perf_counter() - started)


def start_search(traced: Traced, cluster: Cluster, method: Method, say: Progress) -> Search:
    """Everything that the search needs, nothing searched yet."""
    graph = traced.graph
    flow = Flow(graph, Grouping(graph).nests, find_roles(graph))
    say("finding layers")
    assert isinstance(method, Auto | ThreeD)
    layers = find_layers(flow, Wishes(method.layers, method.boundaries))
    say("tracing with another batch")
    rows = Rows(traced)
    if isinstance(method, ThreeD) and not rows.resizes and method.microbatch * method.data < rows.batch:
        raise ShardingError(
            f"{method.name}: the function cannot be traced alike with another batch than its {rows.batch} rows, so it "
            f"cannot be cut into microbatches; use microbatch={rows.batch // method.data}"
        )
    catalogue = Catalogue(rows, layers, cluster, method.memory_fraction, say)
    return Search(catalogue.unpruned() if isinstance(method, ThreeD) else catalogue, flow, say)


def _plain(traced: Traced, search: Search, method: Method, say: Progress) -> Plan | None:
    """The best plan without stages; None where there is none."""
    cluster = search.catalogue.cluster
    if cluster.mixed:
        return None
    auto = Auto(memory_fraction=method.memory_fraction)
    task, meshes = Task(traced, auto), auto.meshes(cluster)
    if search.best is not None and not any(task.can_fit(mesh) for mesh in meshes):
        return None
    try:
        plan = task.plan(meshes, say)
        search.note_bound(plan.solution.lower_bound)
        return plan
    except DoesNotFit as error:
        search.note_misfit(error.needed_bytes, "one program over all devices")
    except ShardingError:  # sizes that no mesh divides
        say("no plan without stages")
    return None
