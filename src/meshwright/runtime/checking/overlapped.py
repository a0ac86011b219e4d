"""Which collectives of a compiled program run beside compute: started early, with work before their results are needed.

XLA's GPU backend writes a program in the order in which it is scheduled, and a collective as a start and a done. What
the devices compute in between hides it; a start that its done follows at once hides nothing, and XLA says so
(``is_sync``).
"""

import re
from collections.abc import Iterable, Iterator, Sequence

_START = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = .*? [\w\-]+-start\(")
_DONE = re.compile(r" [\w\-]+-done\((?:.*?%)?([\w.\-]+)[,)]")
_WRAPPED = re.compile(r"calls=%?([\w.\-]+)")
_SYNC = re.compile(r'"?is_sync"?\s*[:=]\s*"?true')
#: Instructions that occupy a device: kernels and what runs many of them.
_WORK = re.compile(r" (?:fusion|custom-call|dot|convolution|while|call|conditional|sort|scatter|reduce)\(")


def work_beside(bodies: Iterable[Sequence[str]]) -> dict[str, int]:
    """How many instructions of work stand between the start and the end of each asynchronous collective.

    Args:
        bodies: The lines of each computation, in the order in which they are scheduled.

    Returns:
        A number for each start, by its name, and by that of the computation that it wraps; 0 where XLA carries the
        collective out at once.
    """
    return {name: count for body in bodies for start, count in _between(body) for name in _names(start)}


def _names(start: str) -> list[str]:
    """The names that a start goes by: its own, and that of a computation of its own."""
    own = _START.match(start)
    return [*([own[1]] if own else []), *_WRAPPED.findall(start)]


def _between(body: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The line of each start, and how much work is done until its end."""
    works = 0
    started: dict[str, tuple[str, int]] = {}
    for line in body:
        start, done = _START.match(line), _DONE.search(line)
        if start is not None:
            started[start[1]] = line, works
        elif done is not None and done[1] in started:
            begun, before = started.pop(done[1])
            yield begun, 0 if _SYNC.search(begun) else works - before
        elif _WORK.search(line):
            works += 1
