"""Finds the rule of a primitive: the built-in families, and rules that users register with `rule`."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module

from meshwright.errors import RuleError
from meshwright.fallback import is_strict
from meshwright.rules.base import Loop, LoopNest, Rule, Signature
from meshwright.rules.written import written

FAMILIES = (
    "elementwise",
    "contraction",
    "attention",
    "pallas",
    "convolution",
    "reduction",
    "sorting",
    "reshape",
    "layout",
    "windows",
    "indexing",
    "gathering",
    "random",
    "linalg",
    "control_flow",
    "islands",
)

# The parameter that holds the name of external code that a primitive runs; "name" means something else on others.
_NAME_PARAMS = {
    "pallas_call": ("name", "name_and_src_info", "jaxpr"),
    "ffi_call": ("target_name",),
    "tpu_custom_call": ("kernel_name", "name"),
    "composite": ("name",),
    "custom_partitioning": ("call",),
}

_USER_RULES: dict[str, Rule] = {}


def rule(*primitives: str) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of the named primitives, custom calls or kernels.

    A Pallas kernel is named by its ``name``, a foreign-function call by its target.

    Examples:
        >>> @rule("my_attention")
        ... def my_attention(op):
        ...     return nest("b s h d, b t h d, b t h d -> b s h d", op, unsplittable="s t d")
    """

    def register(function: Rule) -> Rule:
        for primitive in primitives:
            _USER_RULES[primitive] = function
        return function

    return register


@cache
def builtin_rules() -> dict[str, Rule]:
    """All built-in rules by primitive name."""
    rules: dict[str, Rule] = {}
    for family in FAMILIES:
        rules |= import_module(f"meshwright.rules.families.{family}").RULES
    return rules


def loop_nest(op: Signature) -> LoopNest:
    """The operation's loop nest; every dim is unsplittable if no rule describes the operation (see `has_rule`).

    An operation whose result's sharding the user wrote leads, so that nothing else decides its split.
    """
    answer = _described(op) or _opaque(op)
    for dims, tensors in ((answer.operands, op.operands), (answer.results, op.results)):
        if [len(d) for d in dims] != [len(t.shape) for t in tensors]:
            raise RuleError(
                f"rule for {kernel_name(op)!r}: it describes tensors of ranks {[len(d) for d in dims]} but the "
                f"operation has {[len(t.shape) for t in tensors]}"
            )
    return answer if answer.leads or written(op) is None else replace(answer, leads=True)


def has_rule(op: Signature) -> bool:
    """Whether a rule describes this operation."""
    return _described(op) is not None


def kernel_name(op: Signature) -> str:
    """The name a user knows the operation by: a kernel's or call target's own name, else the primitive's."""
    for key in _NAME_PARAMS.get(op.primitive, ()):
        value = op.params.get(key)
        value = getattr(value, "debug_info", value)  # an unnamed Pallas kernel is known by its function
        value = getattr(value, "func_name", getattr(value, "name", value))
        if isinstance(value, str) and value:
            return value
    return op.primitive


def _described(op: Signature) -> LoopNest | None:
    """The rule's loop nest; None if there is no rule, or if a built-in one does not support the operation."""
    user = _USER_RULES.get(kernel_name(op)) or _USER_RULES.get(op.primitive)
    if user is not None:
        return user(op)
    builtin = builtin_rules().get(op.primitive)
    try:
        return builtin(op) if builtin is not None else None
    except Exception:
        if is_strict():
            raise
        return None  # `plan.unsplittable` names it


def _opaque(op: Signature) -> LoopNest:
    """A nest of unsplittable loops, one for every dim."""
    loops: list[Loop] = []

    def dims(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        start = len(loops)
        loops.extend(Loop(size, "unsplittable") for size in shape)
        return tuple((start + i,) for i in range(len(shape)))

    operands = tuple(dims(t.shape) for t in op.operands)
    results = tuple(dims(t.shape) for t in op.results)
    return LoopNest(tuple(loops), operands, results)
