"""Train steps of strangers: programs written as the public writes them, none of which is a model of the zoo.

Half of them are set aside by a hash of their names: prices are mended by looking at the others alone, and the half that
was set aside is looked at for the final table. Those of `fresh.py` and `unmeasured.py` were written later. A program of
which somebody has read what XLA makes of it is told from then on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import import_module
from typing import Any

import jax
import optax

Tree = Any
#: What XLA makes of these was read, though they had been set aside or were fresh: their errors were the worst.
READ = frozenset(
    (
        "attentive_translator",
        "deep_equilibrium",
        "dropless_experts",
        "graph_attention",
        "image_vae",
        "largest_of_neighbours",
        "long_scan",
        "minimal_gru",
        "neural_ode",
        "next_basket",
        "optimal_transport",
        "pondering",
        "residual_codes",
        "segmentation",
        "selective_state_space",
        "shifted_windows",
        "vector_quantised",
        "wasserstein_gan",
    )
)
FAMILIES = (
    "text",
    "vision",
    "generative",
    "recurrent",
    "sparse",
    "science",
    "losses",
    "optimizers",
    "fresh",
    "unmeasured",
    "unseen",
)


@dataclass(frozen=True)
class Program:
    """A train step at one size; ``init`` and ``sample`` take a key and can be jitted."""

    init: Callable[[jax.Array], Tree]
    sample: Callable[[jax.Array], Tree]
    step: Callable[[Tree, Tree], tuple[Tree, jax.Array]]

    @property
    def args(self) -> tuple[Tree, Tree]:
        """The types of its state and of its batch."""
        key = jax.random.key(0)
        return jax.eval_shape(self.init, key), jax.eval_shape(self.sample, key)


@dataclass(frozen=True)
class Stranger:
    """A program of the corpus: what builds it, at the size of one accelerator and at a tiny one."""

    name: str
    build: Callable[..., Program]
    full_size: dict[str, Any]
    tiny_size: dict[str, Any]
    is_fresh: bool = False

    @property
    def is_told(self) -> bool:
        """Whether prices may be mended by looking at it."""
        return self.name in READ or (not self.is_fresh and sha256(self.name.encode()).digest()[0] % 2 == 0)

    @property
    def side(self) -> str:
        return "told" if self.is_told else "fresh" if self.is_fresh else "set aside"

    def full(self) -> Program:
        return self.build(**self.full_size)

    def tiny(self) -> Program:
        return self.build(**self.tiny_size)


_CORPUS: dict[str, Stranger] = {}


def stranger(
    tiny: dict[str, Any], *, fresh: bool = False, **full: Any
) -> Callable[[Callable[..., Program]], Callable[..., Program]]:
    """Adds what a function builds to the corpus, under the function's name."""

    def add(build: Callable[..., Program]) -> Callable[..., Program]:
        _CORPUS[build.__name__] = Stranger(build.__name__, build, full, {**full, **tiny}, fresh)
        return build

    return add


def corpus() -> dict[str, Stranger]:
    """All programs by name."""
    for family in FAMILIES:
        import_module(f"{__name__}.{family}")
    return dict(_CORPUS)


def trained(
    init: Callable[[jax.Array], Tree],
    loss: Callable[[Tree, Tree], jax.Array],
    sample: Callable[[jax.Array], Tree],
    optimizer: optax.GradientTransformation | None = None,
) -> Program:
    """The train step that nine tutorials of ten have: a loss, its gradient, an optimizer of Optax."""
    tx = optax.adamw(1e-3) if optimizer is None else optimizer

    def start(key: jax.Array) -> Tree:
        params = init(key)
        return {"params": params, "optimizer": tx.init(params)}

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, moments = tx.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, value

    return Program(start, sample, step)
