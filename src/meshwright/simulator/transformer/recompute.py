"""Recomputation policies of software stacks: the kernels that they repeat and the tensors that they keep."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recompute:
    """The kernels that the backward pass repeats, and the tensors that are kept instead.

    Attributes:
        name: A word for people.
        repeats: Names of the forward kernels that run again.
        keeps: Names of the tensors that are kept in memory.
        share: Part of the layers that do so.
        offloads: Whether the kept tensors go to the host's memory.
    """

    name: str
    repeats: frozenset[str]
    keeps: frozenset[str]
    share: float = 1.0
    offloads: bool = False


_TENSORS = ("input", "norm", "middle", "query", "key", "value", "attention", "up", "activation", "gate", "masks")
#: The kernels of a layer, in order.
KERNELS = (
    "norm",
    "query",
    "key",
    "value",
    "rotary",
    "attention",
    "out",
    "residual",
    "gate",
    "up",
    "activation",
    "down",
)
_ELEMENTWISE = frozenset({"norm", "rotary", "residual", "activation"})
_PRODUCTS = frozenset({"input", "query", "key", "value", "out", "gate", "up", "down"})

NONE = Recompute("none", frozenset(), frozenset({*_TENSORS, "scores"}))
FULL = Recompute("full", frozenset(KERNELS), frozenset({"input"}))
#: Megatron's: scores, softmax and what follows.
ATTENTION = Recompute("attention", frozenset({"attention"}), frozenset(_TENSORS))
#: torchtitan's: every second product, and what is cheap.
ALTERNATE = Recompute(
    "alternate products",
    _ELEMENTWISE | {"key", "out", "up"},
    frozenset({"input", "query", "value", "attention", "gate", "down"}),
)
#: Results of all products are kept, attention's as well.
MINIMAL = Recompute("elementwise", _ELEMENTWISE, _PRODUCTS | {"attention"})
#: Results of products with weights are kept; those with batch dims, which are attention's, are not.
DOTS = Recompute("attention and elementwise", _ELEMENTWISE | {"attention"}, _PRODUCTS)
