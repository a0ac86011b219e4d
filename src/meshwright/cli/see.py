"""The commands that show a plan: show, explain, diff, report, dump, export. None but the last loads JAX."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import meshwright
from meshwright.cli.console import note, show
from meshwright.errors import PlanFileError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshwright.facade import Plan

PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A saved plan.")]
_TAKES = "give a plan that plan.save wrote, or a folder of plan.dump or of Alpa's dump_debug_info"


def show_command(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A saved plan, or a folder that was dumped.")],
    glob: Annotated[str | None, typer.Argument(metavar="GLOB", help="Show the tensors that match instead.")] = None,
) -> None:
    """Print a saved plan, a dumped folder (also one of Alpa's), or the tensors of a plan that match a path."""
    show(_view(path, glob))


def _view(path: Path, glob: str | None) -> "RenderableType":
    if path.is_dir() and not (path / "plan.json").exists():
        from meshwright.explain.alpa.dump import is_dump, read_dump

        if not is_dump(path):
            holds = "that holds neither plan.json nor Alpa's *_placement_specs.txt"
            raise PlanFileError(f"{path} cannot be read: Is a directory {holds}; {_TAKES}")
        return read_dump(path)
    plan = meshwright.Plan.load(path / "plan.json" if path.is_dir() else path)
    return plan_view(plan) if glob is None else plan.show(glob)


def plan_view(plan: "Plan") -> "RenderableType":
    """A plan for the screen."""
    from meshwright.explain.show.plan_text import plan_view

    return plan_view(plan)


def explain_command(
    plan: PlanArgument,
    path: Annotated[
        str | None,
        typer.Argument(metavar="PATH", help="A tensor, such as state/params/layers/3/up; none for the whole step."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time to solve again; what it does not suffice for is bounded.")] = 0.2,
) -> None:
    """Say why a tensor is split as it is and what else would cost; without a tensor, what each decision is worth."""
    found = meshwright.Plan.load(plan)
    show(found.explain() if path is None else found.explain(path, seconds))


def diff_command(
    one: PlanArgument,
    other: Annotated[Path, typer.Argument(metavar="OTHER.json", help="Another saved plan.")],
) -> None:
    """Print what differs between two plans."""
    show(meshwright.Plan.load(one).diff(meshwright.Plan.load(other)))


def report_command(
    plan: PlanArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    against: Annotated[Path | None, typer.Option(help="Another plan, to be shown beside it.")] = None,
    seconds: Annotated[float, typer.Option(help="Time to solve for what else was possible.")] = 20.0,
) -> None:
    """Write one self-contained web page about a plan."""
    other = None if against is None else meshwright.Plan.load(against)
    meshwright.Plan.load(plan).report(output, other, seconds)
    note(f"wrote {output}")


def dump_command(
    plan: PlanArgument,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write; made if need be.")],
) -> None:
    """Write everything there is to know about a plan into a folder."""
    meshwright.Plan.load(plan).dump(folder)
    note(f"wrote {folder}")


def export_command(
    plan: PlanArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("sharding_plan.py"),
    to: Annotated[str, typer.Option(help="What it is written in: jax.")] = "jax",
) -> None:
    """Write a plan as one Python file of plain JAX, for code that does not use Meshwright."""
    meshwright.Plan.load(plan).export(to, output)
    note(f"wrote {output}")


# The functions behind these commands for plain strings, with the number of arguments of each.
PLAIN: dict[str, tuple[Callable[..., None], int, int]] = {
    "show": (lambda plan, glob=None: show_command(Path(plan), glob), 1, 2),
    "explain": (lambda plan, path=None: explain_command(Path(plan), path), 1, 2),
    "diff": (lambda one, other: diff_command(Path(one), Path(other)), 2, 2),
    "dump": (lambda plan, folder: dump_command(Path(plan), Path(folder)), 2, 2),
}
