"""Plans for other devices than before: the search starts from what the last plan decided, and is soon over.

When hosts leave or come, the program is the same, and most of what was decided holds: whether it runs in stages, what
is computed again, how the state is split along the axes of the mesh. So only the view that is most like the last one is
tried, with the state split as it was, and the number of microbatches follows the number of devices; of a pipeline, only
recipes with its recomputation and microbatches of about its size. Where that gives no plan, or one that is slower than
the number of devices explains, all is searched as for the first plan.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from meshwright.graph import Traced
from meshwright.hardware import Cluster, Mesh
from meshwright.pipeline.search.equal_stages import ThreeD
from meshwright.planner.methods import AUTO, Auto, Method
from meshwright.plans.plan import PlanData, partition_spec
from meshwright.plans.tensor import Tensor
from meshwright.step_search.microbatches import batch_argnums, batch_size

SLOWER = 1.1  # than the last plan, times what the number of devices explains: a plan from which all is searched anew
_MOST_COUNTS = 3  # of microbatches that are tried


def methods_as_before(traced: Traced, method: Method, last: PlanData, cluster: Cluster) -> Iterator[Auto]:
    """Methods that repeat what the last plan of a program decided, on other devices, in the order to try them."""
    if not isinstance(method, Auto) or type(method) is not Auto or method.fix or method.mesh_shapes or method.profile:
        return
    mesh = _like(last.mesh, method.meshes(cluster))
    if mesh is None:
        return
    state = [tensor for tensor in last.arguments if tensor.role in ("parameters", "optimizer")]
    fixed = {tensor.path: partition_spec(tensor.spec) for tensor in state if _divides(tensor, mesh)}
    settled = replace(method, fix=fixed, mesh_shapes=[mesh.sizes], recompute=last.recompute, pipeline=False)
    for count in _counts(traced, method, last, mesh.num_devices):
        yield replace(settled, microbatches=count)


def is_as_quick(plan: PlanData, last: PlanData) -> bool:
    """Whether a plan is about as quick as the last one was, for the number of its devices."""
    return plan.step_s * num_devices(plan) <= SLOWER * last.step_s * num_devices(last)


def is_of_others(last: PlanData, cluster: Cluster) -> bool:
    """Whether a plan is for another number of the same devices."""
    return num_devices(last) != cluster.num_devices and last.mesh.chip == cluster.chip


def num_devices(plan: PlanData) -> int:
    """The number of devices of a plan."""
    return sum(stage.mesh.num_devices for stage in plan.stages) or plan.mesh.num_devices


def as_before(last: PlanData) -> str:
    """A remark on a plan that starts from the last one."""
    if last.stages:
        return f"It starts from the plan for {num_devices(last)} devices: its stages recompute as much as there."
    words = "×".join(map(str, last.mesh.sizes))
    return f"It starts from the plan for {num_devices(last)} devices ({words}): its state is split as there."


def other_recipe(recipe: ThreeD, found: PlanData) -> str:
    """A remark on a plan that stands for a recipe of another number of devices."""
    stages = f"{len(found.stages)} stages" if len(found.stages) > 1 else "one program"
    each = f" of {found.stages[0].mesh.num_devices} devices each" if len(found.stages) > 1 else ""
    return (
        f"{recipe.name} is for {recipe.num_devices} devices and there are {num_devices(found)} now: it runs as "
        f"{stages}{each}."
    )


def _like(mesh: Mesh, views: list[Mesh]) -> Mesh | None:
    """The view that has as many axes, of the most similar sizes."""
    alike = [view for view in views if len(view.sizes) == len(mesh.sizes)]

    def distance(view: Mesh) -> float:
        return sum(abs(math.log(new / old)) for new, old in zip(view.sizes, mesh.sizes, strict=True))

    return min(alike, key=distance, default=None)


def _divides(tensor: Tensor, mesh: Mesh) -> bool:
    """Whether the axes that split a tensor divide its dims on another mesh, too."""
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    return all(
        size % math.prod(sizes[axis] for axis in axes) == 0
        for size, axes in zip(tensor.shape, tensor.spec, strict=False)
    )


def _counts(traced: Traced, method: Method, last: PlanData, num_devices: int) -> list[int]:
    """Numbers of microbatches: what the last plan's leave of the batch on each device, then more of them."""
    if method.microbatches != AUTO:
        return [int(method.microbatches)]
    size = batch_size(traced, batch_argnums(traced))
    least = last.microbatches * min(1.0, last.mesh.num_devices / num_devices)
    return [n for n in range(1, size + 1) if size % n == 0 and n >= least][:_MOST_COUNTS] or [last.microbatches]
