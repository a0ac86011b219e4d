"""The `meshwright` command: plans made, compared, simulated and seen, choice problems, models and chips.

Nothing heavy is imported before a command needs it, so that help and catalogues appear at once.
"""

import gc
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import meshwright
from meshwright.cli import see
from meshwright.cli.compare import compare_command
from meshwright.cli.console import Stages, fail, note, show, write_json, write_text
from meshwright.cli.explore import explore_command
from meshwright.cli.launch import SETTINGS, launch_command
from meshwright.cli.measuring.blocks import blocks_command
from meshwright.cli.measuring.enumerate import enumerate_command
from meshwright.cli.measuring.measure import measure_command
from meshwright.cli.measuring.profile import profile_app
from meshwright.cli.measuring.rehearse import rehearse_command
from meshwright.cli.options import JsonFlag, json_option, spelled_out
from meshwright.cli.plan import check_writable, find_plan
from meshwright.cli.plan_serving import plan_serving_command
from meshwright.cli.request import Request, takes_request
from meshwright.cli.serve import serve_command
from meshwright.cli.simulate import simulate_command
from meshwright.cli.solve import solve_command
from meshwright.cli.train import train_command
from meshwright.cli.validate import validate_command
from meshwright.errors import MeshwrightError


class _PlainFlags:
    """Shows a flag in the help as it is typed, without a type: `--scan` takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Command(_PlainFlags, TyperCommand):
    """One command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spelled_out(args))


class _Commands(_PlainFlags, TyperGroup):
    """Turns an error that a user can correct into one line, and Ctrl-C into silence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (MeshwrightError, OSError, KeyboardInterrupt) as error:
            raise typer.Exit(_exit_code(ctx.invoked_subcommand, error)) from None


def _exit_code(command: str | None, error: BaseException) -> int:
    """Prints an error that the user can correct in one line; raises any other error."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, OSError) and not isinstance(error, MeshwrightError):
        if error.filename is None:  # not about a file that the user named
            raise error
        fail(command, f"{error.filename}: {error.strerror}")
    else:
        fail(command, str(error))
    return 2


app = typer.Typer(
    name="meshwright",
    cls=_Commands,
    help="Finds the best way to split single-device JAX code over a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"meshwright {meshwright.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
@takes_request(
    *("model", "cluster", "args", "mesh", "zoo", "method", "microbatches", "recompute", "pipeline", "recipe"),
    "memory_fraction",
)
def plan(
    request: Request,
    json_path: Annotated[Path | None, json_option("the plan", "it")] = None,
    save: Annotated[Path | None, typer.Option(help="Save the plan for `meshwright show` and `mw.Plan.load`.")] = None,
) -> None:
    """Plan a model or a function of your own for a cluster, and print how it is split and what it costs."""
    for path in (json_path, save):
        check_writable(path)
    with redirect_stdout(sys.stderr):  # what the user's code prints is no part of the answer
        planned = find_plan(request, Stages())
    if save is not None:
        planned.save(save)
        note(f"saved {save}")
    if json_path is not None:
        from meshwright.plan_files.storage import plan_json

        write_text(json_path, plan_json(planned))
    if str(json_path) != "-":
        show(see.plan_view(planned))


app.command("compare")(compare_command)


@app.command()
def models(as_json: JsonFlag = False) -> None:
    """List the models of the zoo."""
    from meshwright.cli.catalogue import model_rows, model_table

    rows = model_rows()
    write_json(Path("-"), rows) if as_json else show(model_table(rows))


@app.command()
def chips(
    name: Annotated[str | None, typer.Argument(help="One chip: print every figure of it with its source.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the chips of the catalogue."""
    from meshwright.cli.catalogue import chip_row, chip_rows, chip_table, figure_table

    if as_json:
        write_json(Path("-"), chip_rows() if name is None else chip_row(name))
    else:
        show(chip_table() if name is None else figure_table(name))


app.command("show")(see.show_command)
app.command("explain")(see.explain_command)
app.command("diff")(see.diff_command)
app.command("report")(see.report_command)
app.command("dump")(see.dump_command)
app.command("export")(see.export_command)
app.command("simulate")(simulate_command)
app.command("rehearse")(rehearse_command)
app.command("explore")(explore_command)
app.command("plan-serving")(plan_serving_command)
app.command("measure")(measure_command)
app.command("blocks")(blocks_command)
app.command("enumerate")(enumerate_command)
app.command("launch", context_settings=SETTINGS)(launch_command)
app.command("train")(train_command)
app.command("serve")(serve_command)
app.command("solve")(solve_command)
app.command("validate")(validate_command)
app.add_typer(profile_app, name="profile")
for _command in (*app.registered_commands, *profile_app.registered_commands):
    _command.cls = _Command


def _see(arguments: list[str]) -> bool:
    """Runs a command of `see` that has only plain arguments without the parser; returns False for any other.

    The parser loads a library of its own to check two strings, which takes a quarter of the time of `show`.
    """
    name, given = arguments[0] if arguments else "", arguments[1:]
    if name not in see.PLAIN or any(text.startswith("-") for text in given):
        return False
    command, least, most = see.PLAIN[name]
    if not least <= len(given) <= most:
        return False
    gc.disable()  # the process ends soon
    try:
        command(*given)
    except (MeshwrightError, OSError, KeyboardInterrupt) as error:
        sys.exit(_exit_code(name, error))
    return True


def main() -> None:
    """The entry point of the `meshwright` command."""
    gc.set_threshold(100_000)  # most objects stay: garbage collection takes a tenth of a short command
    try:
        if not _see(sys.argv[1:]):
            app()
    except KeyboardInterrupt:  # before a command has begun
        sys.exit(130)
    finally:
        gc.freeze()  # the interpreter need not scan all objects at exit, which takes as long again


if __name__ == "__main__":
    main()
