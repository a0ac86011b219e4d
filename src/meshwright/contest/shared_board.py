"""A board in shared memory on which processes post their best choices; each writes its own slot only."""

from pathlib import Path

import numpy as np

_HEAD = 4  # stamp, cost, bound, spare


class Board:
    """Slots of one choice each, in a file that several processes map.

    A slot's stamp is odd while it is being written; a reader who sees an odd or changed stamp tries again later.
    """

    def __init__(self, path: str | Path, num_slots: int, num_nodes: int, create: bool = False):
        shape = (num_slots, _HEAD + num_nodes)
        self.table = np.memmap(path, dtype=np.float64, mode="w+" if create else "r+", shape=shape)
        if create:
            self.table[:, 1] = np.inf
            self.table[:, 2] = -np.inf

    def post(self, slot: int, cost: float, choice: np.ndarray) -> None:
        """Writes a choice and its cost into a slot."""
        line = self.table[slot]
        line[0] += 1
        line[1] = cost
        line[_HEAD:] = choice
        line[0] += 1

    def post_bound(self, slot: int, bound: float) -> None:
        self.table[slot, 2] = bound

    def best_cost(self) -> float:
        return float(self.table[:, 1].min())

    def best_bound(self) -> float:
        return float(self.table[:, 2].max())

    def best(self) -> tuple[float, np.ndarray] | None:
        """The cheapest choice on the board, if it can be read whole just now."""
        slot = int(self.table[:, 1].argmin())
        stamp = self.table[slot, 0]
        cost = float(self.table[slot, 1])
        choice = self.table[slot, _HEAD:].astype(np.int64)
        if stamp % 2 or stamp != self.table[slot, 0] or not np.isfinite(cost):
            return None
        return cost, choice
