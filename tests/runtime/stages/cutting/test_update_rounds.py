"""The rounds of an update: which stage computes what, and what it is sent before."""

import jax
import jax.numpy as jnp

from meshwright.program.program import Program
from meshwright.runtime.stages.cutting.update_rounds import UpdateRounds

COUNT = 1500  # gradients of a deep model, whose norm is one chain of additions


def test_the_norm_of_very_many_gradients_takes_one_exchange():
    def clipped(*gradients):
        total = jnp.zeros(())
        for gradient in gradients:
            total = total + (gradient * gradient).sum()
        return [gradient * total for gradient in gradients]

    kinds = [jax.ShapeDtypeStruct((4,), jnp.float32)] * COUNT
    program = Program.of(jax.make_jaxpr(clipped)(*kinds))
    home = {value: int(value >= COUNT // 2) for value in program.inputs}
    wanted = {
        stage: [v for v, at in zip(program.outputs, home.values(), strict=True) if at == stage] for stage in (0, 1)
    }
    found = UpdateRounds(program, range(len(program.operations)), home, wanted).found
    assert (found.num_rounds, list(found.sent)) == (2, [0])
    assert {(at, to) for _, at, to in found.sent[0]} == {(0, 1), (1, 0)}
