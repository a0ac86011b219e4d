"""Atomic writing of files: they are written whole or not at all."""

from contextlib import suppress
from pathlib import Path

from meshwright.errors import OutputError

ESCAPED = "backslashreplace"  # half a surrogate pair, which a name may hold, becomes \ud800: what JSON calls it, too


def check_place(path: Path) -> None:
    """Refuses a place where no file can be, before any work is done for it.

    Raises:
        OutputError: The path is a folder, or in none.
    """
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}; make it first")


def write_whole(path: Path, text: str) -> None:
    """Writes a text file; the old file stays until the new one is complete.

    Raises:
        OutputError: The file cannot be written; nothing of it is left.
    """
    check_place(path)
    scratch = path.with_name(path.name + ".part")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe must not be replaced by a file
            path.write_text(text, encoding="utf-8", errors=ESCAPED)
            return
        scratch.write_text(text, encoding="utf-8", errors=ESCAPED)
        scratch.replace(path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another place") from None
