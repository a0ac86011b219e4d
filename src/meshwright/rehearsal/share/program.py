"""One device's share of a plan as a function and as a compiled program, with values to run it on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright import jax_compat
from meshwright.graph.tracing.trace import Traced
from meshwright.plans.plan import PlanData
from meshwright.plans.tensor import Tensor
from meshwright.rehearsal.share.indices import Indices
from meshwright.rehearsal.share.local_equation import local_shape
from meshwright.rehearsal.share.one_share import OneShare
from meshwright.runtime.program.evaluate import Evaluator
from meshwright.runtime.spmd import check_types, compiler_options

POOL = 1_000_003  # values that are drawn of an array at most; a prime, so that its rows do not recur
SCALE = 0.02  # standard deviation of drawn parameters: activations neither vanish nor overflow


@dataclass(frozen=True)
class Share:
    """One device's share of a plan: a function of shards, whose collectives are replaced by stand-ins.

    Attributes:
        run: From the shards of the arguments' arrays to those of the results'.
        arguments, results: The tensors of the plan that are arrays.
        types: The types of the shards of the arguments.
        state: For each result that is the next value of an argument, the numbers of both.
        indices: The integers among the arguments.
        device: What it is computed with; once the function was traced, it knows which operations are computed whole.
    """

    run: Callable[..., list[Any]]
    arguments: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    types: tuple[Any, ...]
    state: Mapping[int, int]
    indices: Indices
    device: OneShare

    @classmethod
    def of(cls, plan: PlanData, traced: Traced) -> "Share":
        """The share of a plan of a traced function."""
        taken, made = (tuple(t for t in side if t.role != "static") for side in (plan.arguments, plan.results))
        program, device = traced.call.program, OneShare(plan)
        check_types(taken, program.input_types)
        check_types(made, program.output_types)
        types = tuple(
            jax.ShapeDtypeStruct(local_shape(a.shape, t.spec, plan.mesh.shape), a.dtype, weak_type=a.weak_type)
            for a, t in zip(program.input_types, taken, strict=True)
        )

        def run(*leaves: Any) -> list[Any]:
            specs = ([t.spec for t in tensors] for tensors in (taken, made))
            return Evaluator(plan, device).run(program, leaves, *specs)

        return cls(run, taken, made, types, dict(traced.graph.state), Indices.of(traced), device)

    def compile(self, device: Any) -> jax.stages.Compiled:
        """The compiled program for a device; arguments that the plan donates are donated.

        Raises:
            ShardingError: The plan runs a fused kernel that the device does not have.
        """
        self.device.platform = device.platform
        sharding = jax.sharding.SingleDeviceSharding(device)
        jitted = jax.jit(
            self.run,
            in_shardings=sharding,
            out_shardings=sharding,
            donate_argnums=tuple(i for i, t in enumerate(self.arguments) if t.donated),
            compiler_options=compiler_options(device.platform),
        )
        return jitted.lower(*self.types).compile()

    def draw(self, device: Any, given: Sequence[Any] | None = None, seed: int = 0) -> list[Any]:
        """Values for the arguments: shards of given arrays; where there are types instead, drawn values.

        Args:
            device: Where they are put.
            given: The whole arrays of the arguments, or their types; the integers that the plan was made with count
                as given.
            seed: For values that are drawn.
        """
        highest, wholes = longest(self.arguments), list(given or self.types)
        for number, array in self.indices.given.items():
            if isinstance(wholes[number], jax.ShapeDtypeStruct):
                wholes[number] = array
        found, pairs = [], zip(self.arguments, self.types, wholes, strict=True)
        with jax.default_device(device):
            for number, (tensor, kind, whole) in enumerate(pairs):
                if isinstance(whole, jax.ShapeDtypeStruct):
                    rows = self.indices.rows.get(number, highest)
                    value = drawn(tensor, kind, seed * len(self.types) + number, rows)
                else:
                    part = whole[tuple(slice(size) for size in kind.shape)] if kind.shape else whole
                    value = jnp.asarray(part, kind.dtype)
                found.append(jax.device_put(value, device, may_alias=False))  # its own: it may be donated
        return found

    def step(self, compiled: Any, values: Sequence[Any]) -> list[Any]:
        """Starts one step of the compiled program, and returns the arguments of the next."""
        made, following = compiled(*values), list(values)
        for result, argument in self.state.items():
            following[argument] = made[result]
        return following


def longest(tensors: Sequence[Tensor]) -> int:
    """The longest dim of a parameter: integers of which nothing is known are drawn below it, as if they chose a row."""
    return max((max(t.shape, default=1) for t in tensors if t.role == "parameters"), default=2)


def drawn(tensor: Tensor, kind: Any, seed: int, highest: int) -> np.ndarray | jax.Array:
    """Values that a step can be run on: integers below `highest`; the optimiser's state at zero, as optimisers begin.

    NumPy draws them, since JAX would compile its generator for every shape. Large arrays repeat a pool of values: how
    long a program takes depends on how random their bits are, not on whether they recur.
    """
    random, shape = np.random.default_rng(seed), tuple(kind.shape)
    if jax_compat.is_key_dtype(kind.dtype):
        bits = random.integers(0, 2**32, (*shape, *jax_compat.key_shape(kind.dtype)), np.uint32)
        return jax_compat.keys_of_bits(jnp.asarray(bits), kind.dtype)
    count, dtype = min(prod(shape), POOL), jnp.dtype(kind.dtype)
    if jnp.issubdtype(dtype, jnp.inexact) and tensor.role != "optimizer":
        scale = SCALE if tensor.role == "parameters" else 1.0
        return np.resize((np.float32(scale) * random.standard_normal(count, np.float32)).astype(dtype), shape)
    if jnp.issubdtype(dtype, jnp.integer) and tensor.role == "data":
        high = min(highest, int(jnp.iinfo(dtype).max))
        return np.resize(random.integers(0, high, count, np.int32).astype(dtype), shape)
    return np.zeros(shape, dtype)
