"""The tree in which the processes of a program are connected: each has a few neighbours, however many there are.

What all must learn, such as a failure, is passed on from neighbour to neighbour; what the first process collects, such
as how far each process is, comes up along the branches, in one message of each neighbour. So no process has more
connections than its children and its parent, and a message reaches all in as many hops as the tree is deep.
"""

from collections.abc import Iterator

CHILDREN = 4  # of each process: 1,024 processes are five levels deep; `benchmarks/control_plane.py` counts others, too


def parent(process: int) -> int:
    """The process above another one, which is not the first."""
    return (process - 1) // CHILDREN


def children(process: int, count: int) -> range:
    """The processes just below another one, of so many."""
    return range(CHILDREN * process + 1, min(CHILDREN * (process + 1) + 1, count))


def ancestors(process: int) -> Iterator[int]:
    """The processes between another one and the first, which is none of them."""
    while process > CHILDREN:
        process = parent(process)
        yield process


def next_hop(here: int, to: int) -> int:
    """The child through which a process reaches one that is below it."""
    while parent(to) != here:
        to = parent(to)
    return to
