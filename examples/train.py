"""A train step of one's own, as `meshwright plan` takes it. In this folder:

    meshwright plan train:train_step --args train:example_args --cluster "2x8 h100" --save plan.json

`plan_it` does the same from Python and reads a few things off the plan.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import meshwright as mw

BATCH, HIDDEN, WIDE, LAYERS = 65536, 4096, 16384, 8


def loss(params, batch):
    x = batch["x"]
    for layer in params:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return jnp.mean(jnp.square((x - batch["y"]).astype(jnp.float32)))


def train_step(params, batch):
    """One step of gradient descent; the parameters come back, so they keep their sharding from step to step."""
    value, grads = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value


def example_args():
    """Shapes are enough: nothing is allocated."""

    def bf16(*shape):
        return jax.ShapeDtypeStruct(shape, "bfloat16")

    params = [{"up": bf16(HIDDEN, WIDE), "down": bf16(WIDE, HIDDEN)} for _ in range(LAYERS)]
    return params, {"x": bf16(BATCH, HIDDEN), "y": bf16(BATCH, HIDDEN)}


def plan_it() -> None:
    methods = [mw.Auto(), mw.Auto(fix={"batch/*": P("x")}), mw.DataParallel(), mw.Zero(3), mw.TensorParallel()]
    for method in methods:
        plan = mw.plan(train_step, *example_args(), cluster="2x8 h100", method=method)
        up = plan.sharding("params/0/up")
        print(f"{plan.method:16} mesh {plan.mesh.shape}: {1e3 * plan.step_s:.1f} ms, first matrix split as {up}")


if __name__ == "__main__":
    plan_it()
