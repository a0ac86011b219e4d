"""Virtual values: those that cost nothing to make anywhere, so that each reader has them made as it needs them."""

from collections.abc import Sequence
from typing import Any

from meshwright import jax_compat


class Virtual:
    """Knows how each virtual value was made."""

    def __init__(self) -> None:
        # By identity; the value is kept, lest another take its place.
        self._makers: dict[int, tuple[Any, Any, Sequence[Any], int]] = {}

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._makers

    def add(self, eqn: Any, operands: Sequence[Any], made: Sequence[Any]) -> None:
        """Notes what an equation made of its operands."""
        self._makers |= {id(value): (value, eqn, operands, i) for i, value in enumerate(made)}

    def again(self, value: Any) -> Any:
        """The same value, made anew from what is not virtual."""
        if value not in self:
            return value
        _, eqn, operands, result = self._makers[id(value)]
        return jax_compat.bind(eqn, [self.again(x) for x in operands])[result]
