"""Which sums share a start."""

import numpy as np
import pytest

from meshwright.planner.grouping.groups import Grouping
from tests.planner.examples import traced_zoo


@pytest.mark.parametrize(
    "name, options",
    [("mlp", {"layers": 3}), ("gpt-tiny", {}), ("llama-tiny", {"scan": True}), ("wide-resnet-tiny", {})],
)
def test_all_sums_of_gradients_cost_one_start_and_so_do_those_of_the_update(name, options):
    grouping = Grouping(traced_zoo(name, **options).graph)
    phases = np.array([op.phase for op in grouping.graph.ops])
    shared = grouping.starts < 1
    assert grouping.starts[shared & (phases != "update")].sum() == pytest.approx(1)
    assert grouping.starts[shared & (phases == "update")].sum() in (0, pytest.approx(1))
    assert not shared[phases == "forward"].any() and (grouping.starts > 0).all()
