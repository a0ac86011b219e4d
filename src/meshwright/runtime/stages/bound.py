"""Instructions bound to the slots of a step's arrays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import NamedSharding

from meshwright.runtime.stages.lowering.lowered import Lowered
from meshwright.runtime.transfer.reshard import Transfer

Run = Callable[..., Sequence[Any]]
WAIT = "wait"  # for what another process sends


@dataclass(eq=False)
class Move:
    """Moves arrays of one type from stage to stage; it finds its route when it is prepared, or runs first.

    Attributes:
        type: Shape and dtype of the arrays.
        source, target: The shardings that they have and get.
    """

    type: Any
    source: NamedSharding
    target: NamedSharding
    _transfer: Transfer | None = field(default=None, init=False, repr=False)

    def prepare(self) -> Transfer:
        """Finds the route and begins to compile what cuts and joins pieces."""
        if self._transfer is None:
            self._transfer = Transfer(tuple(self.type.shape), self.type.dtype, self.source, self.target)
        return self._transfer

    def __call__(self, array: Any = None) -> list[Any]:
        return [(self._transfer or self.prepare())(array)]

    def post(self, array: Any = None) -> list[Callable[[], Any]]:
        """Begins to move an array between processes; `wait` has it where it is used."""
        return [(self._transfer or self.prepare()).start(array)]


def wait(arrival: Callable[[], Any]) -> list[Any]:
    """Waits for an array of another process, where XLA does not do so itself."""
    return [arrival()]


@dataclass(frozen=True, slots=True)
class Bound:
    """An instruction bound to the slots that it reads and fills.

    Attributes:
        run: The function that it calls.
        reads, fills: The slots of its arguments and of its results.
        name: What it is, for people.
        work: A pass, ``prepare``, ``zeros`` or ``update``; of a transfer, the pass that computed the values,
            ``parameters`` or ``exchange``; ``wait`` where what another process sends is used first.
        stage: The stage that carries it out; of a transfer, the one that receives.
        program: The program that it runs; None for transfers and for empty totals.
        source: Of a transfer, the stage that sends; else -1.
        drops: Slots that nobody reads afterwards.
    """

    run: Run
    reads: Sequence[int]
    fills: Sequence[int]
    name: str
    work: str
    stage: int
    program: Lowered | None = None
    source: int = -1
    drops: Sequence[int] = ()
