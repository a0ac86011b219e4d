"""A leaf of the arguments or results, and how it is split."""

from dataclasses import dataclass

from meshwright.schema import Size

Spec = tuple[tuple[str, ...], ...]  # for each dim of a tensor, the axes that split it


@dataclass(frozen=True, slots=True)
class Tensor:
    """An argument's or result's leaf.

    Attributes:
        path: Parameter name and pytree keys; results start with ``out``.
        shape: Its shape.
        dtype: Its dtype's name.
        spec: Its sharding.
        role: parameters, optimizer or data; state or result; static for a leaf that is not an array.
        donated: Whether an argument's memory may be taken over by a result.
    """

    path: str
    shape: tuple[Size, ...]
    dtype: str
    spec: Spec
    role: str
    donated: bool = False


KEPT = Tensor("", (), "", (), "static")  # a leaf that is not an array: it has no sharding


def spec_text(spec: Spec | None) -> str:
    """A sharding in a few characters: dims by spaces, axes joined by ``+``, ``-`` for none; ``.`` for scalars.

    >>> spec_text((("x", "y"), ()))
    'x+y -'
    """
    if spec is None or spec == ():
        return "."
    return " ".join("+".join(axes) or "-" for axes in spec)


def parse_spec(text: str) -> Spec:
    """The inverse of `spec_text`."""
    if text == ".":
        return ()
    return tuple(() if dim == "-" else tuple(dim.split("+")) for dim in text.split(" "))
