"""The commands `meshwright profile list`, `show`, `export`, `import` and `prune`: the database of measurements."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.console import CommandError, note, show, write_json
from meshwright.cli.options import JsonFlag
from meshwright.console import Table, bare_table
from meshwright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from meshwright.profiler.measurements import Database, Measurement

FileOption = Annotated[
    Path | None, typer.Option("--database", help="The file; that of the cache directory by default.")
]
ChipOption = Annotated[str | None, typer.Option(help="Only measurements on this chip.")]


def list_command(chip: ChipOption = None, database: FileOption = None, as_json: JsonFlag = False) -> None:
    """List what was measured: one row for each segment, chip, type and compiler."""
    from meshwright.profiler.measurements import this_compiler
    from meshwright.profiler.measurements.exchange import to_json

    with _open(database) as opened:
        if as_json:
            write_json(Path("-"), to_json(opened, chip=chip))
            return
        rows = opened.rows(chip=chip)
        show(_summary(rows, this_compiler()))
        note(f"{len(rows)} measurements in {opened.path or 'memory'}")


def show_command(
    fingerprint: Annotated[str, typer.Argument(help="A segment's fingerprint, or how it begins.")],
    chip: ChipOption = None,
    database: FileOption = None,
) -> None:
    """Print every measurement of one segment, the fastest first."""
    with _open(database) as opened:
        rows = [m for m in opened.rows(chip=chip) if m.key.fingerprint.startswith(fingerprint)]
    if not rows:
        raise CommandError(f"nothing was measured of segment {fingerprint}; `meshwright profile list` has them all")
    show(_details(rows))


def export_command(
    path: Annotated[Path, typer.Argument(metavar="FILE.json", help="The file to write.")],
    chip: ChipOption = None,
    database: FileOption = None,
) -> None:
    """Write the measurements as plain JSON for a colleague."""
    from meshwright.profiler.measurements import export_json

    with _open(database) as opened:
        note(f"wrote {export_json(opened, path, chip=chip)} measurements to {path}")


def import_command(
    path: Annotated[Path, typer.Argument(metavar="FILE.json", help="A file that `profile export` wrote.")],
    database: FileOption = None,
) -> None:
    """Add a colleague's measurements; of two of one thing, the later one is kept."""
    from meshwright.profiler.measurements import import_json

    if path.is_dir():
        raise CommandError(f"{path} is a folder; name a file that `meshwright profile export` wrote")
    if not path.exists():
        raise CommandError(
            f"there is no file {path}; a colleague writes one with `meshwright profile export {path.name}`"
        )
    with _open(database) as opened:
        added, left_out = import_json(opened, path)
        later = f"; {left_out} left out, as later ones are known" if left_out else ""
        note(f"added {added} measurements{later}")


def _days_ago(days: int) -> str:
    """The time so many days ago."""
    try:
        if days < 0:
            raise OverflowError
        return (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")
    except OverflowError:
        raise CommandError(f"--older-than is {days}; give a number of days from 0 to some 700,000") from None


def prune_command(
    stale: Annotated[bool, typer.Option("--stale", help="Those of other compilers than the one here.")] = False,
    older_than: Annotated[int | None, typer.Option(help="Those that are older than this many days.")] = None,
    fingerprint: Annotated[str | None, typer.Option(help="Those of one segment.")] = None,
    chip: ChipOption = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    database: FileOption = None,
) -> None:
    """Remove measurements; only what every given option names."""
    from meshwright.profiler.measurements import this_compiler

    if not (stale or everything or older_than is not None or fingerprint or chip):
        raise CommandError("say what to remove: --stale, --older-than DAYS, --fingerprint, --chip or --all")
    before = None if older_than is None else _days_ago(older_than)
    other_than = this_compiler() if stale else None
    with _open(database) as opened:
        count = opened.prune(before=before, other_than=other_than, fingerprint=fingerprint, chip=chip)
        note(f"removed {count} measurements, {len(opened)} are left")


def _open(path: Path | None) -> "Database":
    from meshwright.profiler.measurements import open_database

    return open_database(path)


def _summary(rows: "list[Measurement]", compiler: str) -> Table:
    groups: dict[tuple[str, ...], list[Measurement]] = {}
    for m in rows:
        groups.setdefault((m.key.fingerprint, m.key.chip, m.key.link, m.key.dtype, m.key.compiler), []).append(m)
    figures = "measured", "best"
    table = bare_table("segment", "chip", "link", "dtype", "compiler", *figures, "last", right=figures)
    for (fingerprint, chip, link, dtype, of), members in groups.items():
        times = [m.seconds for m in members if m.seconds is not None]
        table.add_row(
            fingerprint,
            chip,
            link,
            dtype,
            of if of == compiler else f"{of} (stale)",
            str(len(members)),
            format_seconds(min(times)) if times else "-",
            max(m.measured_at for m in members)[:10],
        )
    return table


def _details(rows: "list[Measurement]") -> Table:
    figures = "time", "memory"
    table = bare_table("shardings", "kind", *figures, "chip", "compiler", "measured on", right=figures)
    for m in sorted(rows, key=lambda m: (m.seconds is None, m.seconds or 0)):
        time = m.failure if m.seconds is None else format_seconds(m.seconds)
        memory = "-" if m.memory_bytes is None else format_bytes(m.memory_bytes)
        where = f"{m.host}, {m.measured_at[:16]}, {m.package}"
        table.add_row(m.key.shardings, m.kind, time, memory, m.key.chip, m.key.compiler, where)
    return table
