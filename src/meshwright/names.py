"""Makes names from users and files safe to print on a terminal."""

import re

# C0 and C1 control characters and delete, but for tab and newline, which lay text out; separators of lines and marks of
# direction, which make a terminal show another text than the one that is there; halves of surrogate pairs.
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LAYOUT = str.maketrans({"\n": r"\n", "\t": r"\t"})


def printable(text: str) -> str:
    r"""Text whose control characters are written out, so that a terminal shows them instead of obeying them.

    >>> printable("w\x1b[31m")
    'w\\x1b[31m'
    """
    return text if text.isascii() and text.isprintable() else _UNFIT.sub(_written_out, text)


def one_line(text: str) -> str:
    r"""The same with newlines and tabs written out, too: for a name that stands in a table.

    >>> one_line("w\nb")
    'w\\nb'
    """
    return printable(text).translate(_LAYOUT)


def _written_out(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
