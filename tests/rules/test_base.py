"""Loop nests from texts: what they say, and what is said where they are wrong."""

import pytest

from meshwright.errors import RuleError
from meshwright.rules import Loop, Signature, TensorType, nest


def op(*shapes: tuple[int, ...], result: tuple[int, ...] = (4, 2)) -> Signature:
    return Signature("mm", {}, tuple(TensorType(s, "float32") for s in shapes), (TensorType(result, "float32"),))


def test_a_product() -> None:
    made = nest("m k, k n -> m n", op((4, 8), (8, 2)), reduce={"k": "sum"}, flops=128.0, leads=True)
    assert made.loops == (Loop(4), Loop(8, "sum"), Loop(2))
    assert made.operands == (((0,), (1,)), ((1,), (2,)))
    assert made.results == (((0,), (2,)),)
    assert (made.flops, made.leads, made.fusible) == (128.0, True, False)


def test_merged_dims_scalars_and_whole_dims() -> None:
    made = nest("(a b) ., -> a b", op((8, 3), (), result=(4, 2)), sizes={"a": 4, "b": 2}, unsplittable="b")
    assert [loop.kind for loop in made.loops] == ["parallel", "unsplittable", "unsplittable"]
    assert made.operands == (((0, 1), (2,)), ())
    assert made.results == (((0,), (1,)),)


def test_halo() -> None:
    assert nest("m k -> m k", op((4, 2)), halo={"m": 2}).loops[0] == Loop(4, halo=2)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("m k, k n", {}, "lacks '->'; write operands -> results"),
        ("m k -> m n", {}, "names 1 operands but there are 2"),
        ("m k, k n -> m n, m", {}, "names 2 results but there are 1"),
        ("m, k n -> m n", {}, r"operand 0 has shape \(4, 8\) but the rule gives 1 dims"),
        ("m k, m n -> m n", {}, "operand 1 has 8 where loops m make 4"),
        ("(a b) k, k n -> m n", {}, r"give sizes={...} for \['a', 'b'\] of operand 0"),
        ("m k, k n -> m n", {"reduce": {"q": "sum"}}, "'q'.* is not a loop"),
        ("m k, k n -> m n", {"reduce": {"k": "plus"}}, "'plus'.* with a kind in"),
        ("m k, k n -> m n", {"halo": {"z": 1}}, "'z'.* is not a loop"),
    ],
)
def test_mistakes_are_named(spec: str, options: dict, message: str) -> None:
    with pytest.raises(RuleError, match=message) as error:
        nest(spec, op((4, 8), (8, 2)), **options)
    assert "'mm'" in str(error.value)
