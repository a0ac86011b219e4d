"""Further processes of a search: what they are handed holds numbers alone, in a folder of this user's own."""

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.contest.worker import Crew, work
from meshwright.solver import price
from meshwright.solver.model.model import Model, from_problem
from meshwright.solver.warm import example


def test_a_worker_reads_plain_arrays_of_a_private_folder_and_posts_a_legal_choice():
    problem = example(True, num_nodes=40, num_states=4, seed=2)
    model = from_problem(problem)
    crew = Crew(model, tolerance=0.0, seconds=1.0, seed=0, workers=1)
    try:
        folder = Path(crew.folder.name)
        assert folder.stat().st_mode & 0o077 == 0
        files = {path.name for path in folder.iterdir()} - {"board"}
        assert files == {"task.json", *(f"{name}.npy" for name in Model._fields)}
        json.loads((folder / "task.json").read_text())
        for name, array in model._asdict().items():
            np.testing.assert_array_equal(np.load(folder / f"{name}.npy", allow_pickle=False), array)
        work(folder, slot=0, seed=0)
        cost, choice = crew.board.best()
    finally:
        crew.close()
    priced = price(problem, choice)
    assert priced.legal and priced.cost == pytest.approx(cost)
