"""The `meshwright validate` command: replays published results and reports the errors of the simulation."""

import os
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli import plan
from meshwright.cli.screen import CommandError, note, show, write_json
from meshwright.simulator import published

_NAME = "published.csv"


def validate_command(
    rows: Annotated[
        Path | None,
        typer.Option(help="A CSV file with a row for each result; by default $MESHWRIGHT_DATA/published.csv, or ours."),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Write rows and summary as JSON; '-' writes them to stdout and nothing else."),
    ] = None,
) -> None:
    """Replay published training results: predicted and published step time and memory, row by row."""
    plan.check_writable(json_path)
    path = rows if rows is not None else _default()
    from meshwright.simulator.published.replay import read_rows, replay_rows
    from meshwright.simulator.published.validation import Validation, validation_view

    table = read_rows(path)
    note(f"simulating {len(table)} rows of {path}")
    found = Validation(tuple(replay_rows(table)))
    if len(found.problems) == len(found.rows):
        raise CommandError(f"none of the rows of {path} could be understood; {found.problems[0].problem}")
    if json_path is not None:
        write_json(json_path, found.to_json())
    if str(json_path) != "-":
        show(validation_view(found))


def _default() -> Path:
    """The table of the user's data folder; the few rows that come with the package where none is named."""
    given = os.environ.get("MESHWRIGHT_DATA")
    if not given:
        return Path(published.__file__).with_name("examples.csv")
    if not (Path(given) / _NAME).is_file():
        raise CommandError(
            f"MESHWRIGHT_DATA is {given}, which holds no {_NAME}: give --rows FILE.csv, or leave it unset"
        )
    return Path(given) / _NAME
