"""Finding rules: built-in ones, the user's own by a kernel's name, and what happens where there is none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from meshwright.errors import RuleError
from meshwright.rules import Signature, TensorType, has_rule, kernel_name, loop_nest, nest, registry, rule

from .contract import equations, signature_of


@pytest.fixture(autouse=True)
def fresh_user_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_USER_RULES", {})
    yield


def operation(primitive: str, *shapes: tuple[int, ...], **params: Any) -> Signature:
    types = tuple(TensorType(shape, "float32") for shape in shapes)
    return Signature(primitive, params, types[:-1], types[-1:])


def traced(function: Any, *args: Any) -> Signature:
    (eqn,) = equations(jax.make_jaxpr(function)(*args).jaxpr)
    return signature_of(eqn)


def double_kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * 2


def test_a_primitive_without_a_rule_is_unsplittable() -> None:
    op = operation("mystery", (4, 8), (2,))
    assert not has_rule(op)
    found = loop_nest(op)
    assert {loop.kind for loop in found.loops} == {"unsplittable"}
    assert found.operands == (((0,), (1,)),)
    assert found.results == (((2,),),)


def test_a_form_that_the_rule_declines_is_unsplittable() -> None:
    op = operation("add", (4, 8), (2, 8), (4, 8))
    assert not has_rule(op)
    assert all(loop.kind == "unsplittable" for loop in loop_nest(op).loops)


def test_a_users_rule_is_found() -> None:
    @rule("mystery", "riddle")
    def rows(op: Signature):
        return nest("r c -> r c", op, unsplittable="c")

    assert has_rule(operation("riddle", (4, 8), (4, 8)))
    assert [loop.kind for loop in loop_nest(operation("mystery", (4, 8), (4, 8))).loops] == ["parallel", "unsplittable"]


def test_a_users_rule_comes_before_the_built_in_one() -> None:
    rule("exp")(lambda op: nest("r c -> r c", op, unsplittable="r c"))
    assert all(loop.kind == "unsplittable" for loop in loop_nest(operation("exp", (4, 8), (4, 8))).loops)


def test_a_rule_of_another_rank_is_an_error() -> None:
    rule("mystery")(lambda op: nest("r -> r", operation("other", (4,), (4,))))
    with pytest.raises(RuleError, match=r"'mystery'.*ranks \[1\] but the operation has \[2\]"):
        loop_nest(operation("mystery", (4, 8), (4, 8)))


@pytest.mark.parametrize(("name", "expected"), [("my_scale", "my_scale"), (None, "double_kernel")])
def test_pallas_kernels_go_by_their_name_or_function(name: str | None, expected: str) -> None:
    def call(x: jax.Array) -> jax.Array:
        return pl.pallas_call(double_kernel, out_shape=x, name=name, interpret=True)(x)

    found = [signature_of(e) for e in jax.make_jaxpr(call)(jnp.ones((4, 8))).eqns if e.primitive.name == "pallas_call"]
    assert [kernel_name(op) for op in found] == [expected]
    assert all(loop.kind == "unsplittable" for loop in loop_nest(found[0]).loops)
    rule(expected)(lambda op: nest("r c -> r c", op))
    assert has_rule(found[0])


def test_foreign_calls_go_by_their_target() -> None:
    op = traced(lambda x: jax.ffi.ffi_call("my_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x), jnp.ones((4, 8)))
    assert kernel_name(op) == "my_target"
    rule("my_target")(lambda op: nest("r c -> r c", op))
    assert has_rule(op)


def test_a_name_on_another_primitive_is_not_a_kernels() -> None:
    rule("attention")(lambda op: None)
    op = operation("name", (4, 8), (4, 8), name="attention")
    assert kernel_name(op) == "name"
    assert has_rule(op)


def test_the_recipe_runs_as_printed() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "inside", "add-a-primitive.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    exec(code, {})
    op = operation("pallas_call", *[(2, 8, 4, 16)] * 4, name="flash_attention")
    made = loop_nest(op)
    assert [loop.kind for loop in made.loops].count("parallel") == 2
    assert made.flops == 4 * 2 * 4 * 8 * 8 * 16
