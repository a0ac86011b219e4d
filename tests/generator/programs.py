"""Draws programs: some arguments, then steps that each make a value out of those before."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.generator.arithmetic import ARITHMETIC
from tests.generator.control import CONTROL, WITHOUT_DERIVATIVE
from tests.generator.movement import MOVEMENT, blocks, draw_bits
from tests.generator.pool import POSITIONS, NothingFits, Pool
from tests.generator.transforms import TRANSFORMS, WITHOUT_DERIVATIVES
from tests.generator.values import FLOATS, INTEGERS, ROUNDED, SIZES, Value, difference, draw_array, exact_up_to, tamed

STEPS: tuple[Callable[[Pool], Value], ...] = (
    *(*ARITHMETIC, *ARITHMETIC, *MOVEMENT, *MOVEMENT, *CONTROL, *TRANSFORMS, *TRANSFORMS),
)
_LARGEST = 4096  # elements of a value: what is larger takes long and tells no more


class Drawn:
    """A program drawn at random.

    Attributes:
        args: Arguments to call it with.
        trust: How strictly each leaf of its results is compared; known once it has been traced.
    """

    def __init__(self, seed: int, num_steps: int = 6, batch: int | None = None, kernels: bool = False):
        """Draws it; with a batch, the first dims of the first arguments are examples, and no random bits are drawn.

        With ``kernels``, one program in four has a step that is a Pallas kernel.
        """
        rng = np.random.default_rng(seed)
        self.batch = batch
        self.special = bool(rng.random() < 0.5)
        self.shapes = [self._shape(rng, i) for i in range(4)]
        self.dtypes = [str(rng.choice(FLOATS)), "float32", str(rng.choice(FLOATS)), str(rng.choice(INTEGERS))]
        steps = [step for step in STEPS if batch is None or step is not draw_bits]
        self.steps = [(steps[rng.integers(len(steps))], int(rng.integers(1 << 30))) for _ in range(num_steps)]
        if kernels and seed % 4 == 3:
            self.steps[num_steps // 2] = (blocks, seed)
        is_smooth = not any(step in (blocks, *WITHOUT_DERIVATIVE, *WITHOUT_DERIVATIVES) for step, _ in self.steps)
        self.with_gradient = bool(rng.random() < 0.5) and is_smooth
        drawn = (draw_array(rng, s, d, self.special) for s, d in zip(self.shapes, self.dtypes, strict=True))
        self.args = (*map(jnp.asarray, drawn), jnp.array(POSITIONS, jnp.int32), jax.random.key(seed))
        self.trust: list[int] = []

    def _shape(self, rng: np.random.Generator, number: int) -> tuple[int, ...]:
        shape = rng.choice(SIZES, rng.integers(1, 4)).tolist()
        if self.batch is None and rng.random() < 0.03:
            for dim in rng.integers(len(shape), size=2):
                shape[dim] = 0
        if self.batch is not None and number < 2:
            shape[0] = self.batch
        return tuple(shape)

    def on_one_device(self, *args: Any) -> Any:
        """What one device must compute: the program without what XLA gets wrong on one device (compiler-faults.md)."""
        return self(*args, cuts_first=True)

    def __call__(self, *args: Any, cuts_first: bool = False) -> Any:
        values = self.values(*args, cuts_first=cuts_first)
        self.trust = [v.trust for v in values]
        if not self.with_gradient:
            return [v.array for v in values]
        floats = [i for i, d in enumerate(self.dtypes) if d == "float32"]

        def loss(*chosen: Any) -> Any:
            given = dict(zip(floats, chosen, strict=True))
            made = self.values(*(given.get(i, a) for i, a in enumerate(args)), cuts_first=cuts_first)
            return sum(jnp.sum(jnp.tanh(v.array / 64)) for v in made if v.dtype == "float32")

        gradients = jax.grad(lambda chosen: jnp.float32(loss(*chosen)))([args[i] for i in floats])
        self.trust += [ROUNDED] * len(gradients)
        return [v.array for v in values], gradients

    def values(self, *args: Any, cuts_first: bool = False) -> list[Value]:
        *arrays, positions, key = args
        known = [Value(a, 4.0, finite=not self.special) for a in arrays]
        pool = Pool(known, positions, key, cuts_first)
        made: list[Value] = []
        for step, seed in self.steps:
            pool.rng = np.random.default_rng(seed)
            try:
                value = step(pool)
            except NothingFits:
                continue
            if value.array.size > _LARGEST:
                value = value.made(value.array.reshape(-1)[:_LARGEST])
            if value.is_exact and value.limit > exact_up_to(value.dtype):
                value = tamed(value, 4)
            pool.values.append(value)
            made.append(value)
        return made

    def __str__(self) -> str:
        kinds = ", ".join(f"{d}{list(s)}" for d, s in zip(self.dtypes, self.shapes, strict=True))
        return f"{kinds}: {' '.join(step.__name__ for step, _ in self.steps)}"


def differences(expected: Any, found: Any, trust: Sequence[int]) -> list[str]:
    """What differs between one device's results and others'."""
    leaves = zip(jax.tree.leaves(expected), jax.tree.leaves(found), trust, strict=True)
    seen = [(i, difference(a, b, strictness)) for i, (a, b, strictness) in enumerate(leaves)]
    return [f"result {i}: {what}" for i, what in seen if what is not None]
