"""How the axes of a view are used: one of the names in `WAYS`, or a split optimised for a single stage."""

from meshwright.hardware import Mesh
from meshwright.pipeline.prices.layer_prices import LayerPrices
from meshwright.pipeline.prices.layer_pricing import Pricing
from meshwright.pipeline.prices.stage_problem import Own, price_own
from meshwright.planner.methods import Auto, TensorParallel

Way = str | Own

FREE, STEADY, LEAN, TENSOR = "free", "steady", "lean", "tensor"
WAYS = (
    FREE,  # the fastest for one microbatch
    STEADY,  # the fastest for many
    LEAN,  # the one that needs least memory
    TENSOR,  # weights split, as in Megatron-LM
)
_MANY = 16  # microbatches


def price_way(pricing: Pricing, mesh: Mesh, way: Way) -> LayerPrices | None:
    """The layers' prices on a view, or None if the view is infeasible."""
    if isinstance(way, Own):
        return price_own(pricing, mesh, way)
    if way == STEADY:
        return price_own(pricing, mesh, Own(None, _MANY))
    return pricing.price(mesh, TensorParallel() if way == TENSOR else Auto(), way == LEAN)
