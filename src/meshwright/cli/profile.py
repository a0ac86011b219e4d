"""The group of commands `meshwright profile`: a model's passes, and the database of measurements."""

from typing import Any

import typer
from typer.core import TyperGroup

from meshwright.cli import measurements


class _ModelOrWord(TyperGroup):
    """Takes a word that is none of its commands for a model: `meshwright profile gpt-tiny`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["model", *args]
        return super().parse_args(ctx, args)


profile_app = typer.Typer(
    cls=_ModelOrWord,
    help="Measure the segments of a model and plan with them; list, exchange and prune what was measured.",
    no_args_is_help=True,
)
profile_app.command("list")(measurements.list_command)
profile_app.command("show")(measurements.show_command)
profile_app.command("export")(measurements.export_command)
profile_app.command("import")(measurements.import_command)
profile_app.command("prune")(measurements.prune_command)
