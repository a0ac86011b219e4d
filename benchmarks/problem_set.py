"""A wide set of choice problems: folded training steps of the zoo, random programs, and the contest's graphs.

Problems are made once and kept in a folder, since the moments at which a planner holds memory depend on the choices
that its solver found: kept, they are the same for every version of the solver. A hash of the name puts each problem
into one of two halves: constants may be tuned on the *tuning* half; the *held out* half only judges.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from meshwright.solver import ChoiceProblem
from meshwright.solver.problem import validate

CONTEST = {"A": 60, "B": 60, "D": 60, "G": 120, "M": 180, "P": 240, "S": 240, "V": 300}  # time limits in seconds
MODELS = {
    "gpt3-1.3b": {"batch": 64},
    "gpt3-13b": {"batch": 64, "checkpoint": True},
    "llama2-7b": {"batch": 64, "checkpoint": True},
    "bert-large": {"batch": 64},
    "vit-l16": {"batch": 64},
    "gshard-moe-1.3b": {"batch": 64},
    "mixtral-8x7b": {"batch": 64, "checkpoint": True},
    "wide-resnet-500m": {"batch": 64},
    "unet-cifar10": {"batch": 64},
}
MESHES = {(8, 8): "8x8 a100-80gb", (16, 4): "16x4 a100-80gb", (2, 4, 4): "8x4 a100-80gb", (64,): "32x2 h100"}
LIMITS = (0.1, 0.3, 0.6)  # parts of the way from the least memory that suffices to what the best choice takes
PROGRAMS, PROGRAM_MESH = range(100, 132), (2, 2, 2)
QUICK_MODELS = ("gpt3-1.3b", "llama2-7b", "gshard-moe-1.3b", "wide-resnet-500m")
SECONDS = 10.0  # for one folded or random problem
LONG = ("llama2-7b 8x8 0.1", "wide-resnet-500m 8x8 0.1", *(f"wide-resnet-500m 2x4x4 {part}" for part in LIMITS))


@dataclass(frozen=True)
class Case:
    """One problem with the seconds that a solver gets for it, and the half of the set to which it belongs."""

    family: str
    name: str
    problem: ChoiceProblem
    seconds: float

    @property
    def half(self) -> str:
        return half_of(self.name)


def half_of(name: str) -> str:
    return ("tuning", "held out")[hashlib.sha256(name.encode()).digest()[0] % 2]


def kept(folder: Path, quick: bool, small: bool = False) -> list[Case]:
    """The problems of a folder, in which those that are missing are made first; with `quick`, a small part of them.

    With `small`, only those of these that are made soon and solved within two seconds, without random programs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if small:
        return [*_folded(folder, QUICK_MODELS, [(8, 8), (2, 4, 4)], LIMITS[::2], LONG), *contest("G")]
    models, meshes, programs = (
        (QUICK_MODELS, [(8, 8), (2, 4, 4)], PROGRAMS[:8]) if quick else (MODELS, MESHES, PROGRAMS)
    )
    cases = [*_folded(folder, models, meshes, LIMITS[::2] if quick else LIMITS), *_random(folder, programs)]
    return cases + list(contest("BG" if quick else "".join(CONTEST)))


def _folded(
    folder: Path, models: Iterable[str], meshes: Iterable[tuple[int, ...]], limits, skipped: Iterable[str] = ()
) -> Iterator[Case]:
    """Folded training steps on several meshes, with memory held where the planner came to hold it."""
    import meshwright as mw
    from meshwright import zoo
    from meshwright.graph import trace
    from meshwright.planner.planner import Task

    for model in models:

        @cache
        def task(model: str = model) -> Task:
            example = zoo.build(model, **MODELS[model])
            return Task(trace(example.train_step, example.state, example.batch), mw.Auto())

        for shape in meshes:
            formulation = cache(lambda task=task, shape=shape: task().formulate(mw.cluster(MESHES[shape]).mesh(shape)))
            for part in limits:
                name = f"{model} {'x'.join(map(str, shape))} {part}"
                if name not in skipped:
                    yield from _case(folder, "folded", name, formulation, part)


def _random(folder: Path, programs: Iterable[int]) -> Iterator[Case]:
    """Programs drawn at random (`tests/generator`) on a mesh of eight devices, in tight memory."""
    import meshwright as mw
    from meshwright.graph import trace
    from meshwright.planner.planner import Task
    from tests.generator.programs import Drawn

    for seed in programs:

        def formulation(seed: int = seed):
            program = Drawn(seed, num_steps=30)
            task = Task(trace(program, *program.args), mw.Auto())
            return task.formulate(mw.cluster("2x4 h100").mesh(PROGRAM_MESH))

        yield from _case(folder, "random", f"program {seed}", formulation, 0.3)


def _case(folder: Path, family: str, name: str, formulation: Callable, part: float) -> Iterator[Case]:
    """The case of a file, which is made where there is none; nothing where memory cannot bind."""
    path = folder / f"{name}.npz"
    if not path.exists():
        problem = _limited(formulation(), part)
        _save(path, problem)
    problem = _load(path)
    if problem.limit < np.inf:
        yield Case(family, name, problem, SECONDS)


def _limited(formulation, part: float) -> ChoiceProblem:
    """A problem under a limit, held at the moments at which the planner came to hold it; without, where none binds."""
    from meshwright.planner.solving.fit_memory import View, ViewState

    free, least = ViewState(View(formulation, None)).step(), formulation.memory.least().peak_bytes
    view = View(formulation, float(np.ceil(least + part * (free.peak_bytes - least))))
    state = ViewState(view)
    while not state.is_done and not state.has_failed:
        state = state.advance()
    return (free if state.fitted is None else state).moments.problem(formulation, view.limit)[0]


def contest(graphs: str) -> Iterator[Case]:
    """Graphs of the ASPLOS/EuroSys 2025 contest at a tenth of their time limits, where their data are at hand."""
    folder = Path(os.environ.get("MESHWRIGHT_DATA", ROOT.parent / "shared" / "data")) / "iopddl"
    if not folder.is_dir():
        print(f"SKIPPED: no contest data at {folder}; set MESHWRIGHT_DATA to the folder that holds iopddl/")
        return
    for graph in graphs:
        problem = ChoiceProblem.load(folder / f"{graph}.json.gz")
        yield Case("contest", f"graph {graph}", problem, CONTEST[graph] / 10)


_EDGES = ("edge_nodes", "edge_matrix", "matrix_first", "matrix")
_ROWS = ("row_node", "row_start", "row_end", "row_first", "usage")


def _save(path: Path, problem: ChoiceProblem) -> None:
    arrays = {name: getattr(problem, name) for name in ("first", "cost", *_EDGES, *_ROWS)}
    np.savez_compressed(path, limit=problem.limit, **arrays)


def _load(path: Path) -> ChoiceProblem:
    with np.load(path) as arrays:
        edges = validate.Edges(*(arrays[name] for name in _EDGES))
        rows = validate.MemoryRows(*(arrays[name] for name in _ROWS))
        return ChoiceProblem.from_arrays(arrays["first"], arrays["cost"], edges, rows, float(arrays["limit"]))
