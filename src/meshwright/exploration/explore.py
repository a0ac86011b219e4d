"""`mw.explore`: the same function planned and simulated on several clusters, to see which one to rent."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.errors import ClusterError, DoesNotFit, ShardingError
from meshwright.exploration.exploration import OBJECTIVES, Exploration
from meshwright.exploration.offer import Offer
from meshwright.exploration.rental_prices import cluster_price
from meshwright.hardware import Cluster
from meshwright.planner.method_names import find_method
from meshwright.planner.methods import Auto, Method
from meshwright.planning import plan
from meshwright.profiler import cluster as find_cluster


def explore(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    clusters: Sequence[Cluster | str],
    objective: str = "tokens_per_dollar",
    method: Method | str | None = None,
    prices: Mapping[str, float] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Exploration:
    """Plans and simulates a function on every cluster and ranks them.

    Args:
        function: An ordinary single-device JAX function, such as a train step.
        args: Its arguments, as `mw.plan` takes them.
        clusters: Clusters, or what `mw.cluster` takes.
        objective: The figure to rank by: ``"tokens_per_dollar"``, ``"tokens_per_s"``, ``"step_s"`` or ``"mfu"``.
        method: How to plan: a method or its short name; `Auto` by default. Where hosts are of several kinds,
            `Auto` plans in stages.
        prices: Dollars for one device and hour by name of the chip, instead of the package's own.
        on_progress: Called with a sentence on each stage.

    Returns:
        The ranking; print it, or save its picture.

    Examples:
        >>> import jax.numpy as jnp, meshwright as mw
        >>> args = (jnp.ones((64, 32)), jnp.ones((32, 32)))
        >>> found = mw.explore(lambda x, w: x @ w, args, clusters=["1x4 h100", "1x4 a100"], objective="step_s")
        >>> len(found.offers)
        2
    """
    if objective not in OBJECTIVES:
        raise ClusterError(f"objective is {objective!r}; choose one of {', '.join(OBJECTIVES)}")
    if isinstance(clusters, str | Cluster) or not clusters:
        raise ClusterError(f"clusters is {clusters!r}; give a list such as ['2x8 h100', '4x8 a100-80gb']")
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise ClusterError(f"args is {args!r}; give the function's arguments as a tuple, such as (state, batch)")
    machines = [c if isinstance(c, Cluster) else find_cluster(c) for c in clusters]
    offers = []
    for machine in machines:
        if on_progress is not None:
            on_progress(f"planning for {machine.name}")
        how = find_method(method)
        if machine.mixed and isinstance(how, Auto):  # one program cannot be on hosts of several kinds
            how = replace(how, pipeline=True)
        offers.append(_offer(function, args, machine, how, prices or {}))
    return Exploration(tuple(offers), objective).ranked()


def _offer(
    function: Callable[..., Any], args: Sequence[Any], machine: Cluster, method: Method, prices: Mapping[str, float]
) -> Offer:
    price = cluster_price(machine, prices)
    dollars, source = (price.dollars, price.source) if price else (None, "")
    try:
        planned = plan(function, *args, cluster=machine, method=method)
    except (ClusterError, DoesNotFit, ShardingError) as error:
        # A cluster that is too small, or does not suit the shapes or the method, must not hide the results of the
        # others.
        return Offer(machine, None, None, dollars, source, str(error))
    return Offer(machine, planned, planned.simulate(), dollars, source, "")
