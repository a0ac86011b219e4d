"""The `meshwright validate` command: replays published results, as recipes or as plans, and reports the errors."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright import validation
from meshwright.cli import plan
from meshwright.cli.console import CommandError, give, note
from meshwright.cli.options import json_option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshwright.validation.row import Row

_NAME = "published.csv"


def validate_command(
    rows: Annotated[
        Path | None,
        typer.Option(help="A CSV file with a row for each result; by default $MESHWRIGHT_DATA/published.csv, or ours."),
    ] = None,
    plans: Annotated[
        bool,
        typer.Option("--plans", help="Plan each row's model of the zoo as its authors split it; a few seconds a row."),
    ] = False,
    json_path: Annotated[Path | None, json_option("rows and summary")] = None,
) -> None:
    """Replay published training results: predicted and published step time and memory, row by row."""
    plan.check_writable(json_path)
    path = rows if rows is not None else _default()
    from meshwright.validation.replay import read_rows

    table = read_rows(path)
    note(f"{'planning and ' if plans else ''}simulating {len(table)} rows of {path}")
    data, view = _as_plans(table, path) if plans else _as_recipes(table, path)
    give(json_path, data, view)


def _as_recipes(table: "list[Row]", path: Path) -> "tuple[dict[str, Any], RenderableType]":
    from meshwright.validation.replay import replay_rows
    from meshwright.validation.validation import Validation, validation_view

    validation = Validation(tuple(replay_rows(table)))
    if len(validation.problems) == len(validation.rows):
        raise CommandError(f"none of the rows of {path} could be understood; {validation.problems[0].problem}")
    return validation.to_json(), validation_view(validation)


def _as_plans(table: "list[Row]", path: Path) -> "tuple[dict[str, Any], RenderableType]":
    from meshwright.validation.plan_table import PlanValidation, plan_validation_view
    from meshwright.validation.replay_plans import replay_plans

    rows = []
    for number, row in enumerate(replay_plans(table), 1):
        note(f"{number} of {len(table)}  {row}")  # a run of many minutes that is cut keeps what it found
        rows.append(row)
    validation = PlanValidation(tuple(rows))
    if not validation.expressed:
        raise CommandError(f"none of the rows of {path} can be planned; {validation.rows[0].problem}")
    return validation.to_json(), plan_validation_view(validation)


def _default() -> Path:
    """The table of the user's data folder; the few rows that come with the package where none is named."""
    given = os.environ.get("MESHWRIGHT_DATA")
    if not given:
        return Path(validation.__file__).with_name("examples.csv")
    if not (Path(given) / _NAME).is_file():
        raise CommandError(
            f"MESHWRIGHT_DATA is {given}, which holds no {_NAME}: give --rows FILE.csv, or leave it unset"
        )
    return Path(given) / _NAME
