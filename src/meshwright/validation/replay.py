"""Replays rows: each becomes a recipe, is simulated, and is compared with the published figures."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.simulator.engine import simulate_work
from meshwright.simulator.simulation import Simulation
from meshwright.simulator.transformer.recipe import Recipe
from meshwright.simulator.transformer.work import recipe_work
from meshwright.validation.row import Row, RowError, recipe_of

_GIB = 2**30
_NEEDED = ("gpus", "gpu_type", "hidden", "layers", "seq")  # columns without which no row can be understood
_NEAR_LIMIT = 0.8  # fraction of a device's memory: the simulated peak is no more accurate than that


class RowsError(MeshwrightError, ValueError):
    """A file of rows that cannot be read."""


@dataclass(frozen=True)
class Replay:
    """One row, predicted and published.

    Attributes:
        row: The row.
        published_step_s, published_peak_gib: The published figures; None where the row has none.
        predicted_step_s: The simulated time of a step; None where the row cannot be understood.
        predicted_peak_gib: The simulated peak memory.
        fits: Whether that much memory is there.
        causes: The causes that make the row hard to predict.
        problem: Why it cannot be understood; empty where it can.
    """

    row: Row
    published_step_s: float | None = None
    published_peak_gib: float | None = None
    predicted_step_s: float | None = None
    predicted_peak_gib: float | None = None
    fits: bool | None = None
    causes: tuple[str, ...] = ()
    problem: str = ""

    @property
    def error(self) -> float | None:
        """Predicted over published time, less one."""
        return _error(self.predicted_step_s, self.published_step_s)

    @property
    def memory_error(self) -> float | None:
        return _error(self.predicted_peak_gib, self.published_peak_gib)

    @property
    def strategy(self) -> tuple[str, ...]:
        """The columns that distinguish the strategies of two rows of one model and source."""
        names = ("dp", "tp", "pp", "cp", "ep", "zero_stage", "microbatch", "interleave_v", "recompute", "precision")
        return tuple(self.row.text(name) for name in names)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "row_id": self.row.id,
            "source": self.row.text("source"),
            "model": self.row.text("model"),
            "trust": self.row.trust,
            "precision": self.row.text("precision"),
            "predicted_step_s": self.predicted_step_s,
            "published_step_s": self.published_step_s,
            "error": self.error,
            "predicted_peak_gib": self.predicted_peak_gib,
            "published_peak_gib": self.published_peak_gib,
            "memory_error": self.memory_error,
            "fits": self.fits,
            "causes": list(self.causes),
            "problem": self.problem,
        }


def read_rows(path: Path) -> list[Row]:
    """Reads a CSV file in the format of `published.csv`; optional columns may be missing.

    Raises:
        RowsError: There is no such file, or no row in it, or no column that every row needs.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = list(csv.DictReader(file))
    except FileNotFoundError:
        raise RowsError(f"there is no file {path}; give a CSV file in the format of published.csv") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RowsError(f"{path} cannot be read as CSV: {error}") from None
    missing = [name for name in _NEEDED if not table or name not in table[0]]
    if missing:
        raise RowsError(
            f"{path} has no rows with a column {missing[0]}; the first line must name the columns of published.csv"
        )
    return [Row({"row_id": f"row {number}", **_filled(cells)}) for number, cells in enumerate(table, 1)]


def _filled(cells: dict[str, Any]) -> dict[str, str]:
    """The non-empty cells of the named columns."""
    return {name: value for name, value in cells.items() if isinstance(name, str) and isinstance(value, str) and value}


def replay_rows(rows: Iterable[Row]) -> Iterator[Replay]:
    """Replays rows one by one; one that cannot be understood says why."""
    for row in rows:
        replayed = Replay(row)
        try:
            replayed = Replay(row, row.step_s, row.peak_gib)
            yield _predicted(replayed)
        except MeshwrightError as error:
            yield replace(replayed, problem=str(error) if isinstance(error, RowError) else f"{row.id}: {error}")


def replay(row: Row) -> Replay:
    """Simulates one row.

    Raises:
        RowError: It cannot be understood.
    """
    return _predicted(Replay(row, row.step_s, row.peak_gib))


def _predicted(known: Replay) -> Replay:
    recipe = recipe_of(known.row)
    simulation = simulate_work(recipe_work(recipe, known.row.id))
    return replace(
        known,
        predicted_step_s=simulation.step_s,
        predicted_peak_gib=simulation.peak_bytes / _GIB,
        fits=simulation.fits,
        causes=tuple(_causes(recipe, simulation)),
    )


def _error(predicted: float | None, published: float | None) -> float | None:
    return predicted / published - 1 if predicted and published else None


def _causes(recipe: Recipe, simulation: Simulation) -> Iterator[str]:
    """The known causes that make a row hard to predict."""
    if recipe.stack.remark:
        yield recipe.stack.remark
    if recipe.by_row:
        yield "8-bit products scaled by row, whose kernels were slow"
    elif recipe.dtype != "bfloat16":
        yield "8-bit products: casts and scales depend on the recipe"
    if recipe.context > 1:
        yield "context parallelism: small blocks, and results merged between them"
    if recipe.recompute.offloads or recipe.recompute.name == "custom":
        yield "the recomputed and offloaded activations are only partly known"
    if recipe.cluster.chip.vendor == "Google":
        yield "rates of TPU kernels are estimates: no microbenchmark is available"
    elif simulation.peak_bytes > _NEAR_LIMIT * simulation.work.limit_bytes[0]:
        yield "memory may be nearly full: allocators free and retry then"
    if recipe.cluster.num_hosts > 1 and recipe.zero == 3 and recipe.cluster.intra.topology != "torus":
        yield "parameters fetched over a network whose real rate is not published"
