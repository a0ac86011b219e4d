"""Counts the FLOPs of products in the body of a kernel, averaged over the programs of its grid.

How long a loop runs, and whether a block is skipped, often depends on a program's position in the grid, as with causal
masks. The body's scalars are therefore evaluated at several positions; what they do not determine is counted once.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

Number = int | float | bool | None  # None: not known

_MOST_POSITIONS = 8  # along each axis; more would not change an average that is linear in the position

_SCALARS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": lambda a, b: int(a / b) if isinstance(a, int) and isinstance(b, int) else a / b,
    "rem": lambda a, b: a - b * int(a / b),
    "max": max,
    "min": min,
    "neg": operator.neg,
    "sign": lambda a: (a > 0) - (a < 0),
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
    "not": lambda a: not a if isinstance(a, bool) else ~a,
    "select_n": lambda which, *cases: cases[int(which)],
    "clamp": lambda low, a, high: min(max(low, a), high),
    "convert_element_type": lambda a: a,
}


def body_flops(jaxpr: Any, sizes: Sequence[int], asked_for: Sequence[int]) -> float:
    """Mean FLOPs of the products of one program.

    Args:
        jaxpr: The kernel's body.
        sizes: Number of programs along each axis of the grid.
        asked_for: The axes that the body asks for its position along.
    """
    samples = [_spread(sizes[axis]) for axis in asked_for]
    found = [
        _Program(sizes, dict(zip(asked_for, position, strict=True))).flops(jaxpr, [None] * len(jaxpr.invars))[0]
        for position in product(*samples)
    ]
    return sum(found) / len(found)


def _spread(size: int) -> list[int]:
    """Positions that are spread evenly, with the same mean as all positions."""
    count = min(size, _MOST_POSITIONS)
    return [(2 * i + 1) * size // (2 * count) for i in range(count)]


class _Program:
    """One program of a grid."""

    def __init__(self, sizes: Sequence[int], position: Mapping[int, int]) -> None:
        self.sizes = sizes
        self.position = position

    def flops(self, jaxpr: Any, inputs: Sequence[Number]) -> tuple[float, list[Number]]:
        """FLOPs of a jaxpr's products, and its results as far as they are known."""
        env: dict[int, Number] = {id(var): value for var, value in zip(jaxpr.invars, inputs, strict=True)}

        def read(var: Any) -> Number:
            value = getattr(var, "val", None)
            if value is None:
                return env.get(id(var))
            return value.item() if getattr(value, "shape", None) == () else value if _is_number(value) else None

        total = 0.0
        for eqn in jaxpr.eqns:
            done, made = self._equation(eqn, [read(var) for var in eqn.invars])
            total += done
            env.update({id(var): value for var, value in zip(eqn.outvars, made, strict=False)})
        return total, [read(var) for var in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[Number]) -> tuple[float, Sequence[Number]]:
        name, params = eqn.primitive.name, eqn.params
        if name in ("program_id", "num_programs"):
            axis = params["axis"]
            return 0.0, [self.position[axis] if name == "program_id" else self.sizes[axis]]
        if name == "dot_general":
            return _dot_flops(eqn), []
        if name == "while":
            return self._while(params, ins), []
        if name == "scan":
            inner = _open(params["jaxpr"])
            return params["length"] * self.flops(inner, [None] * len(inner.invars))[0], []
        if name == "cond":
            return self._cond(params, ins)
        if name in _SCALARS:
            return 0.0, [None if None in ins else _SCALARS[name](*ins)]
        return self._call(params, ins)

    def _while(self, params: Any, ins: list[Number]) -> float:
        """FLOPs of a loop that counts up to a bound, as `jax.lax.fori_loop` does; of one trip if the bound is open."""
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        condition, body = _open(params["cond_jaxpr"]), _open(params["body_jaxpr"])
        known = dict(zip(map(id, condition.invars), [*ins[:num_cond], *ins[num_cond + num_body :]], strict=True))
        bounds = []
        if len(condition.eqns) == 1 and condition.eqns[0].primitive.name == "lt":
            bounds = [getattr(var, "val", known.get(id(var))) for var in condition.eqns[0].invars]
        trips = 1.0 if None in bounds or not bounds else max(0.0, float(bounds[1] - bounds[0]))  # type: ignore[operator]
        carry = [None] * (len(body.invars) - num_body)
        return trips * self.flops(body, [*ins[num_cond : num_cond + num_body], *carry])[0]

    def _cond(self, params: Any, ins: list[Number]) -> tuple[float, Sequence[Number]]:
        branches = [self.flops(_open(branch), ins[1:]) for branch in params["branches"]]
        if ins[0] is None:
            return max(done for done, _ in branches), []
        return branches[min(max(int(ins[0]), 0), len(branches) - 1)]

    def _call(self, params: Any, ins: list[Number]) -> tuple[float, Sequence[Number]]:
        """A call of another jaxpr, or an operation without products."""
        for value in params.values():
            inner = _open(value)
            if hasattr(inner, "eqns"):
                fits = len(inner.invars) == len(ins)
                return self.flops(inner, ins if fits else [None] * len(inner.invars))
        return 0.0, []


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | bool)


def _dot_flops(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return 2.0 * prod(eqn.outvars[0].aval.shape) * prod(shape[d] for d in contracted)
