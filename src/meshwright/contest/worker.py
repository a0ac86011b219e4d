"""A further process of a search: reads the model from a folder, searches it, posts on a board in shared memory."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.contest.anytime import Search
from meshwright.contest.tuning import SEARCH, SearchTuning
from meshwright.solver.deadline import Deadline
from meshwright.solver.model.model import Model
from meshwright.solver.tuning import Tuning

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


class Crew:
    """Worker processes on one model, and the board they share with this process (slot 0).

    They are started as `python -m meshwright.contest.worker`: unlike a forked or spawned process, that neither
    copies the threads of this one nor runs the user's script again. The model is handed over as plain arrays in a
    folder that only this user can enter.
    """

    def __init__(
        self, model: Model, tolerance: float, seconds: float, seed: int, workers: int, tuning: SearchTuning = SEARCH
    ):
        self.folder = tempfile.TemporaryDirectory(prefix="meshwright-", dir=_shared_memory())
        path = Path(self.folder.name)
        for name, array in model._asdict().items():
            np.save(path / f"{name}.npy", array, allow_pickle=False)
        task = {"tolerance": tolerance, "until": time.time() + seconds, "workers": workers, "tuning": asdict(tuning)}
        (path / "task.json").write_text(json.dumps(task))
        self.board = Board(path / "board", workers, model.num_nodes, create=True)
        command = [sys.executable, "-m", "meshwright.contest.worker", str(path)]
        self.processes = [
            subprocess.Popen(
                [*command, str(slot), str(seed + slot)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            for slot in range(1, workers)
        ]

    def close(self) -> None:
        """Ends the workers and removes what they shared."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        del self.board
        self.folder.cleanup()


def _shared_memory() -> str | None:
    """A folder in memory where the system has one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def work(folder: Path, slot: int, seed: int) -> None:
    """Searches until the time is up, posting every improvement."""
    task = json.loads((folder / "task.json").read_text())
    model = Model(*(np.load(folder / f"{name}.npy", allow_pickle=False) for name in Model._fields))
    board = Board(folder / "board", task["workers"], model.num_nodes)
    deadline = Deadline.after(task["until"] - time.time())
    tuning = _tuning(task["tuning"])
    parent = os.getppid()

    def poll() -> tuple[float, np.ndarray] | None:
        if os.getppid() != parent:  # whoever wanted the answer is gone
            raise KeyboardInterrupt
        return board.best()

    Search(
        model,
        task["tolerance"],
        deadline,
        seed,
        tell=lambda cost, choice: board.post(slot, cost, choice),
        tell_bound=lambda bound: board.post_bound(slot, bound),
        poll=poll,
        tuning=tuning,
    ).run()


def _tuning(entries: dict[str, Any]) -> SearchTuning:
    """A tuning that was written as JSON, which has no tuples."""

    def with_tuples(part: dict[str, Any]) -> dict[str, Any]:
        return {name: tuple(it) if isinstance(it, list) else it for name, it in part.items()}

    read = with_tuples(entries)
    return SearchTuning(**{**read, "solver": Tuning(**with_tuples(entries["solver"]))})


def main() -> None:
    folder, slot, seed = sys.argv[1:]
    np.seterr(all="ignore")
    try:
        work(Path(folder), int(slot), int(seed))
    except (KeyboardInterrupt, FileNotFoundError):  # the search was ended from the terminal, or is over
        sys.exit(0)


if __name__ == "__main__":
    main()
