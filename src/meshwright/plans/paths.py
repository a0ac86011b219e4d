"""Looks tensors up by path: exact names, globs, and the nearest names for a path that matches nothing."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from meshwright.names import one_line, printable


def match_paths(pattern: str, paths: Iterable[str]) -> list[str]:
    """Paths equal to the pattern, as they are or as a screen shows them; else those that it matches as a glob."""
    every = list(paths)
    if pattern in every:
        return [pattern]
    shown = [p for p in every if pattern in (printable(p), one_line(p))]
    return shown or [p for p in every if fnmatchcase(p, pattern)]


def nearest(pattern: str, paths: Sequence[str]) -> str:
    """A hint for a message: the paths that look most like the pattern."""
    close = get_close_matches(pattern, paths, n=4, cutoff=0.3) or list(paths[:4])
    return f"paths look like {', '.join(close)}" if close else "the function has no arrays"
