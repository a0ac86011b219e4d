"""A step in a loop over the parts of its batch, on random train steps: its ids, and with recomputation as well."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from meshwright.graph.tracing.call import call_abstractly
from meshwright.runtime.microbatches.microbatches import in_microbatches
from meshwright.runtime.recomputation.recomputed import recomputed
from tests.generator.train_steps import draw_train_step
from tests.program.ids import named, same_names

pytestmark = pytest.mark.devices


def drawn_call(seed):
    drawn = draw_train_step(seed)
    state = drawn.init(jax.random.key(0))
    return drawn, state, call_abstractly(drawn.step, (state, drawn.batch))


@pytest.mark.parametrize("seed", [0, 3, 5])
def test_operations_know_which_of_the_step_they_were(seed):
    _, _, call = drawn_call(seed)
    changed = in_microbatches(call, (1,), 2)
    assert same_names(call.program, changed)
    after, taken = named(changed.program), set(changed.former.values())
    assert all(number in changed.former for number, name in after.items() if name == "dot_general")
    assert {number for number, name in named(call.program).items() if name == "dot_general"} <= taken
    assert sorted(after) == list(range(changed.program.num_ids))


@pytest.mark.parametrize("seed", [4, 12])
def test_microbatches_of_a_step_that_computes_again_have_its_numbers(seed):
    drawn, state, call = drawn_call(seed)
    leaves = jax.tree.leaves((state, drawn.batch))
    again = recomputed(call.program, "full")
    assert same_names(call.program, again)
    cut = in_microbatches(replace(call, program=again.program), (1,), 2)
    assert same_names(again.program, cut) and same_names(call.program, cut.after(again))
    assert any(one.is_checkpoint for one in cut.program.walk())
    expected, found = (jax.jit(program.run)(leaves) for program in (call.program, cut.program))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4, err_msg=drawn.words)
