"""Every rule holds: computing on shards and combining as its loop nest says equals computing whole."""

from collections.abc import Iterator
from math import prod

import jax
import pytest

from meshwright.rules import LoopNest, has_rule, loop_nest
from meshwright.rules.registry import builtin_rules

from .cases import Builder, Sizes, cases_of, draws_sizes
from .contract import Case, all_at_once, check, done_plainly, one_and_two_axes, signature, to_single_iterations

CASES = cases_of("CASES")
ALIKE = cases_of("ALIKE")

# Each seed has its own shapes, and tries other splits of them.
SPLITS = (one_and_two_axes, to_single_iterations)

# Beginnings of the names of primitives that take long to compile.
LONG = ("conv_", "dot_product_attention", "gather", "pallas_call", "ragged_dot", "random_", "scatter")

# Other spellings of a primitive that has its own cases, functions too slow to compile for being told apart, and
# primitives that only JAX 0.11 has.
ALIASES = {
    "log2": "log",
    "one_minus_square": "square",
    "philox2x32": "threefry2x32",
    "philox4x32": "threefry2x32",
    "threefry4x32": "threefry2x32",
    "igammac": "igamma",
    "igamma_grad_a": "igamma",
    "ragged_dot": "ragged_dot_general",
    "scatter_add": "scatter-add",
    "scatter_sub": "scatter-sub",
    "scatter_mul": "scatter-mul",
    "scatter_max": "scatter-max",
    "scatter_min": "scatter-min",
}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Nearly all the time goes into compiling hundreds of tiny programs, whose speed does not matter."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def _prepare(primitive: str, build: Builder, seed: int) -> tuple[Case, LoopNest]:
    case = build(Sizes(seed))
    op = signature(primitive, case)
    assert has_rule(op)
    nest = done_plainly(loop_nest(op))
    for dims, tensors in ((nest.operands, op.operands), (nest.results, op.results)):
        for dim_loops, tensor in zip(dims, tensors, strict=True):
            assert tuple(prod(nest.loops[loop].size for loop in dim) for dim in dim_loops) == tensor.shape
    return case, nest


@pytest.mark.parametrize(
    ("primitive", "build", "seed"),
    [
        pytest.param(*case, seed, id=f"{case[0]}-{case[1].__name__}-{seed}", marks=slow)
        for case in CASES
        for seed in ((0, 1) if draws_sizes(case[1]) else (0,))
        for slow in ([pytest.mark.slow] if seed or case[0].startswith(LONG) else [],)
    ],
)
def test_shards_combine_to_the_whole(primitive: str, build: Builder, seed: int) -> None:
    case, nest = _prepare(primitive, build, seed)
    for parts in SPLITS[seed](nest):
        check(case, nest, parts)


@pytest.mark.sweep(45)
@pytest.mark.slow
@pytest.mark.parametrize(("primitive", "build"), ALIKE, ids=[f"{p}-{b.__name__}" for p, b in ALIKE])
def test_operations_that_share_a_rule(primitive: str, build: Builder) -> None:
    case, nest = _prepare(primitive, build, seed=0)
    for parts in all_at_once(nest):
        check(case, nest, parts)


def test_every_rule_has_a_case() -> None:
    covered = {primitive for primitive, _ in (*CASES, *ALIKE)} | set(ALIASES)
    assert set(builtin_rules()) - covered == set()


@pytest.mark.parametrize(("alias", "primitive"), ALIASES.items())
def test_aliases_share_their_rule(alias: str, primitive: str) -> None:
    assert builtin_rules()[alias] is builtin_rules()[primitive]
