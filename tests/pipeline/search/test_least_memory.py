"""How near a model that fits nowhere came: with so much memory it fits, and with less it does not."""

import optax
import pytest

import meshwright as mw
from tests.pipeline.models import mlp

pytestmark = pytest.mark.slow


@pytest.mark.sweep(1)
@pytest.mark.parametrize("machines", ["3x2 h100", "1x1 h100 + 1x3 v100-16gb", "1x3 a100-40gb"])
def test_what_is_said_to_be_needed_is_what_is_needed(machines):
    """Unequal stages need less than equal ones on three hosts; three replicas need microbatches of three rows."""
    step, args = mlp(512, layers=7, rows=12, optimizer=optax.adam(1e-3))
    memory = mw.cluster(machines).memory_bytes

    def planned(num_bytes):
        return mw.plan(step, *args, cluster=machines, method=mw.Auto(pipeline=True, memory_fraction=num_bytes / memory))

    with pytest.raises(mw.DoesNotFit, match=r"the nearest, .*, needs") as caught:
        planned(1e5)
    needed = caught.value.needed_bytes
    assert planned(needed * (1 + 1e-6)).memory.peak_bytes > 0
    with pytest.raises(mw.DoesNotFit) as caught:
        planned(0.99 * needed)
    assert caught.value.needed_bytes == needed


def test_a_recipe_that_does_not_fit_is_told_of_itself():
    """Not that sizes do not divide, which is what a price that was never asked for would look like."""
    step, args = mlp(512, layers=4, rows=64)
    recipe = mw.ThreeD(data=2, pipeline=2, microbatch=8, memory_fraction=1e-8)
    with pytest.raises(mw.DoesNotFit, match="the nearest, pipeline=2 by 1f1b with checkpoint=none, needs"):
        mw.plan(step, *args, cluster="1x4 h100", method=recipe)
