"""`mw.simulate`: a plan becomes work, and the event engine runs it."""

from meshwright.errors import SimulationError
from meshwright.hardware import Cluster
from meshwright.plans.plan import PlanData
from meshwright.profiler import cluster as find_cluster
from meshwright.simulator.engine import simulate_work
from meshwright.simulator.simulation import Simulation
from meshwright.simulator.software import XLA, XLA_CPU
from meshwright.simulator.spmd import spmd_work
from meshwright.simulator.staged import staged_work


def simulate(plan: PlanData, cluster: Cluster | str | None = None) -> Simulation:
    """Simulates one step of a plan: compute, collectives and transfers that overlap and disturb each other.

    Args:
        plan: A plan, fresh or loaded.
        cluster: Other machines with as many devices, or what `mw.cluster` takes; the plan's own by default.

    Returns:
        The simulation; print it.

    Raises:
        SimulationError: The mesh is abstract, so nothing takes seconds, or the cluster does not suit the plan.

    Examples:
        >>> import jax.numpy as jnp, meshwright as mw
        >>> plan = mw.plan(lambda x, w: x @ w, jnp.ones((64, 32)), jnp.ones((32, 32)), cluster="1x4 h100")
        >>> mw.simulate(plan).step_s > 0
        True
    """
    if not isinstance(plan, PlanData):
        raise SimulationError(f"plan is {plan!r}; give what mw.plan returns, or a plan that mw.Plan.load has read")
    planned_cluster = plan.mesh.cluster
    if planned_cluster is None:
        raise SimulationError(
            f"the plan is for an abstract mesh {plan.mesh.shape}, whose costs are not seconds: nothing can be "
            "simulated; plan for a cluster, such as cluster='8x8 h100'"
        )
    machines = (
        planned_cluster if cluster is None else cluster if isinstance(cluster, Cluster) else find_cluster(cluster)
    )
    if plan.stages:
        return simulate_work(staged_work(plan, machines))
    if machines.num_devices != plan.mesh.num_devices:
        raise SimulationError(
            f"the plan is for {plan.mesh.num_devices} devices, and cluster {machines.name!r} has "
            f"{machines.num_devices}: give one of the same size, or plan again for it"
        )
    mesh = plan.mesh if machines == planned_cluster else machines.mesh(plan.mesh.sizes)
    return simulate_work(spmd_work(plan, mesh, XLA_CPU if mesh.is_cpu else XLA))
