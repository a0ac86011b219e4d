"""Counts XLA's involuntary full rematerialisations: values that its partitioner gathers whole to reshard them.

XLA reports them only as warnings on the process's standard error, so it is read while a program is compiled, and what
else was written there is passed on afterwards.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from meshwright import jax_devices
from meshwright.runtime.checking.compiled import origin_of

_WARNING = re.compile(r"^.*\[(?:SPMD|spmd)\] Involuntary full rematerialization\..*$", re.MULTILINE)
_SHARDINGS = re.compile(r"go from sharding (\{.*?\}) to (\{.*?\}) ")
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_HIDDEN_FROM = 2  # the level at which warnings are no longer written


@dataclass(frozen=True)
class Rematerialized:
    """One value that XLA gathers whole.

    Attributes:
        operation: Scopes and primitive of the operation, as XLA names them.
        source: The user's source line, ``file:line``; empty where XLA does not know.
        before: The sharding that it has, as XLA writes it.
        after: The sharding that is needed.
    """

    operation: str
    source: str
    before: str
    after: str

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        return f"{self.operation or 'a value'}{where}: {self.before} to {self.after}"


@dataclass
class Heard:
    """The warnings of some compilations; whether warnings were written at all is known before."""

    text: str = ""
    counted: bool = field(default_factory=lambda: _is_written())

    def found(self, frames: Mapping[str, str] | None = None) -> tuple[Rematerialized, ...]:
        """Every rematerialisation; ``frames`` has the source line of each stack frame of the program."""
        found = [_parse(match[0]) for match in _WARNING.finditer(self.text)]
        return tuple(replace(one, source=(frames or {}).get(one.source, one.source)) for one in found)


def rematerialized_lines(found: Sequence[Rematerialized] | None) -> list[str]:
    """Sentences on what XLA gathers whole."""
    if found is None:
        return [f"Values that XLA gathers whole were not counted: {_LEVEL}={os.environ.get(_LEVEL)} hides its warnings"]
    return [f"XLA gathers {len(found)} values whole to reshard them:", *map(str, found)] if found else []


@contextmanager
def heard() -> Iterator[Heard]:
    """Reads what XLA warns of in this context; programs are compiled anew, and not taken from a cache."""
    found = Heard()
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as file, jax_devices.without_compilation_cache():
        os.dup2(file.fileno(), 2)
        try:
            yield found
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            file.seek(0)
            found.text = file.read().decode(errors="replace")
            if rest := _WARNING.sub("", found.text).strip():
                sys.stderr.write(rest + "\n")


def _is_written() -> bool:
    level = os.environ.get(_LEVEL, "")
    return not level.isdigit() or int(level) < _HIDDEN_FROM


def _parse(line: str) -> Rematerialized:
    shardings = _SHARDINGS.search(line)
    return Rematerialized(*origin_of(line), *(shardings.groups() if shardings else ("", "")))
