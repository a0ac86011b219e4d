"""The order in which XLA's CPU backend runs kernels: depth first from the results.

Of what a kernel reads, first what has most behind it: most further readers of what leads to it, counted along every
path, then most memory. So the gradients of weights come last, all together, and until then what they are made from is
in memory. A loop's body is ordered by itself. XLA orders a program that is split, here it is whole, since an order must
not depend on the choice that it is to help to make; memory only decides where counts are equal.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """A kernel, or a whole loop.

    Attributes:
        makes: The values it writes.
        reads: The values it reads, in order.
    """

    makes: Sequence[int]
    reads: Sequence[int]


def depth_first(nodes: Mapping[int, Node], size: Sequence[float], ends: Iterable[int]) -> list[int]:
    """The names of some nodes in the order in which they run; what no end needs is left out.

    Args:
        nodes: The program's kernels, or those of a loop's body, by name.
        size: Bytes of each value.
        ends: Values that are there to the end.
    """
    maker = {v: name for name, node in nodes.items() for v in node.makes}
    before = {
        name: list(dict.fromkeys(maker[v] for v in node.reads if maker.get(v, name) != name))
        for name, node in nodes.items()
    }
    roots = list(dict.fromkeys(maker[v] for v in ends if v in maker))
    plain = walk(roots, before)
    fan_out: dict[int, int] = dict.fromkeys(plain, -1)
    for name in plain:
        for other in before[name]:
            fan_out[other] += 1
    # Counts along every path grow beyond all bounds: they are kept below the number of kernels and of values given to
    # them, sizes below what was written so far.
    bound = len(plain) + len({v for name in plain for v in nodes[name].reads if v not in maker})
    behind: dict[int, int] = {}
    sizes: dict[int, float] = {}
    written = 0.0
    for name in plain:
        own = sum(size[v] for v in nodes[name].makes)
        written += own
        behind[name] = min(max(fan_out[name], 0) + sum(behind[q] for q in before[name]), bound)
        sizes[name] = min(own + sum(sizes[q] for q in before[name]), written)

    def most(names: Iterable[int]) -> list[int]:
        return sorted(names, key=lambda q: (-behind[q], -sizes[q], q))

    return walk(most(roots), {name: most(before[name]) for name in plain})


def walk(roots: Iterable[int], before: dict[int, list[int]]) -> list[int]:
    """Depth first from the roots, each name after those before it."""
    order: list[int] = []
    seen: set[int] = set()
    started, path = [iter(roots)], list[int]()
    while started:
        for name in started[-1]:
            if name not in seen:
                seen.add(name)
                path.append(name)
                started.append(iter(before[name]))
                break
        else:
            started.pop()
            if path:
                order.append(path.pop())
    return order
