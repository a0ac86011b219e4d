"""Counts the FLOPs of products in the body of a kernel, averaged over the programs of its grid.

How long a loop runs, and whether a block is skipped, often depends on a program's position in the grid, as with causal
masks, or on a table that is looked up there. The body's scalars are therefore evaluated at all positions at once, each
as an array over the grid; what they do not determine is counted once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Number = NDArray[Any] | None  # a scalar at each position of the grid; None: not known

_MOST_POSITIONS = 2**18  # of the grid; beyond it they are spread evenly


def _quotient(a: Any, b: Any) -> NDArray[Any]:
    """JAX's division: integers are rounded towards zero."""
    exact = np.true_divide(a, b)
    return np.trunc(exact).astype(np.int64) if a.dtype.kind in "iu" else exact


_SCALARS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _quotient,
    "rem": np.fmod,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "sign": np.sign,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "select_n": lambda which, *cases: np.choose(which.astype(np.int64), cases),
    "clamp": lambda low, a, high: np.minimum(np.maximum(low, a), high),
    "convert_element_type": lambda a: a,
}


@dataclass(frozen=True)
class Table:
    """The contents of an operand that a kernel's index maps and body look up by position.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        contents: Its elements in order.
        digest: Stands for the elements where the table is printed.
    """

    shape: tuple[int, ...]
    dtype: str
    contents: bytes = field(repr=False)
    digest: str = ""

    @classmethod
    def of(cls, array: NDArray[Any]) -> "Table":
        """The table of an array."""
        contents = np.ascontiguousarray(array).tobytes()
        return cls(array.shape, array.dtype.name, contents, blake2b(contents, digest_size=8).hexdigest())

    def array(self) -> NDArray[Any]:
        return np.frombuffer(self.contents, self.dtype).reshape(self.shape)


def body_flops(
    jaxpr: Any, sizes: Sequence[int], asked_for: Sequence[int], tables: Sequence[Table | None] = ()
) -> float:
    """Mean FLOPs of the products of one program.

    Args:
        jaxpr: The kernel's body.
        sizes: Number of programs along each axis of the grid.
        asked_for: The axes that the body asks for its position along.
        tables: The body's first inputs, where their contents are known.
    """
    most = int(_MOST_POSITIONS ** (1 / max(len(asked_for), 1)))
    all_positions = prod(sizes[axis] for axis in asked_for) <= _MOST_POSITIONS
    samples = [_spread(sizes[axis], sizes[axis] if all_positions else most) for axis in asked_for]
    position = dict(zip(asked_for, np.meshgrid(*samples, indexing="ij", sparse=True), strict=True))
    arrays = [None if table is None else table.array() for table in tables]
    inputs = [*arrays, *[None] * (len(jaxpr.invars) - len(arrays))]
    with np.errstate(all="ignore"):  # branches that are not taken are evaluated, too
        flops, _ = _Program(sizes, position).flops(jaxpr, inputs)
    return float(np.broadcast_to(flops, [len(sample) for sample in samples]).mean())


def _spread(size: int, most: int) -> NDArray[np.int64]:
    """Positions that are spread evenly, with the same mean as all positions."""
    count = min(size, most)
    return (2 * np.arange(count) + 1) * size // (2 * count)


class _Program:
    """The programs of a grid."""

    def __init__(self, sizes: Sequence[int], position: Mapping[int, NDArray[Any]]) -> None:
        self.sizes = sizes
        self.position = position

    def flops(self, jaxpr: Any, inputs: Sequence[Number]) -> tuple[Any, list[Number]]:
        """FLOPs of a jaxpr's products, and its results as far as they are known."""
        env: dict[int, Number] = {id(var): value for var, value in zip(jaxpr.invars, inputs, strict=True)}

        def read(var: Any) -> Number:
            value = getattr(var, "val", None)
            if value is None:
                return env.get(id(var))
            return np.asarray(value) if getattr(value, "shape", ()) == () and _is_number(value) else None

        total: Any = 0.0
        for eqn in jaxpr.eqns:
            done, results = self._equation(eqn, [read(var) for var in eqn.invars])
            total = total + done
            env.update({id(var): value for var, value in zip(eqn.outvars, results, strict=False)})
        return total, [read(var) for var in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[Number]) -> tuple[Any, Sequence[Number]]:
        name, params = eqn.primitive.name, eqn.params
        if name in ("program_id", "num_programs"):
            axis = params["axis"]
            return 0.0, [self.position[axis] if name == "program_id" else np.asarray(self.sizes[axis])]
        if name == "get":
            return 0.0, [_looked_up(ins)]
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
            values = [value for value in ins if value is not None]
            return 0.0, [_SCALARS[name](*values) if len(values) == len(ins) else None]
        return self._call(params, ins)

    def _while(self, params: Any, ins: list[Number]) -> float | NDArray[Any]:
        """FLOPs of a loop that counts up to a bound, as `jax.lax.fori_loop` does; of one trip if the bound is open."""
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        condition, body = _open(params["cond_jaxpr"]), _open(params["body_jaxpr"])
        scalars = dict(zip(map(id, condition.invars), [*ins[:num_cond], *ins[num_cond + num_body :]], strict=True))
        trips: Any = 1.0
        if len(condition.eqns) == 1 and condition.eqns[0].primitive.name == "lt":
            first, end = (getattr(var, "val", scalars.get(id(var))) for var in condition.eqns[0].invars)
            trips = trips if first is None or end is None else np.maximum(0.0, np.subtract(end, first))
        carry = [None] * (len(body.invars) - num_body)
        return trips * self.flops(body, [*ins[num_cond : num_cond + num_body], *carry])[0]

    def _cond(self, params: Any, ins: list[Number]) -> tuple[Any, Sequence[Number]]:
        branches = [self.flops(_open(branch), ins[1:]) for branch in params["branches"]]
        if ins[0] is None:
            return max((done for done, _ in branches), key=np.mean), []
        which = np.clip(ins[0].astype(np.int64), 0, len(branches) - 1)
        chosen = [_chosen(which, results) for results in zip(*(results_of for _, results_of in branches), strict=True)]
        return np.choose(which, [done for done, _ in branches]), chosen

    def _call(self, params: Any, ins: list[Number]) -> tuple[Any, Sequence[Number]]:
        """A call of another jaxpr, or an operation without products."""
        for value in params.values():
            inner = _open(value)
            if hasattr(inner, "eqns"):
                fits = len(inner.invars) == len(ins)
                return self.flops(inner, ins if fits else [None] * len(inner.invars))
        return 0.0, []


def _chosen(which: NDArray[Any], results: Sequence[Number]) -> Number:
    values = [result for result in results if result is not None]
    return np.choose(which, values) if len(values) == len(results) else None


def _looked_up(ins: Sequence[Number]) -> Number:
    """An element of a table; None if the table or the place is not known, or if it is more than one element."""
    table, *places = ins
    if table is None or len(places) != table.ndim:
        return None
    known_places = [place for place in places if place is not None]
    if len(known_places) != len(places):
        return None
    return table[tuple(np.clip(place, 0, size - 1) for place, size in zip(known_places, table.shape, strict=True))]


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _is_number(value: Any) -> bool:
    return np.asarray(value).dtype.kind in "biuf"


def _dot_flops(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return 2.0 * prod(eqn.outvars[0].aval.shape) * prod(shape[d] for d in contracted)
