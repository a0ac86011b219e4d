"""The order in which XLA's CPU backend runs kernels: of two, the one that takes less memory.

One is *depth first* from the results: of what a kernel reads, first what has most behind it. So the gradients of
weights come last, all together, and until then what they are made from is in memory. The other is *greedy*: of the
kernels that are ready, the one that gives most memory back. A loop's body is ordered by itself. XLA compares them as
split; here they are compared whole, since an order must not depend on the choice that it is to help to make.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush


@dataclass(slots=True)
class Node:
    """A kernel, or a whole loop.

    Attributes:
        makes: The values it writes.
        reads: The values it reads.
        num_bytes: What it takes besides, while it runs.
    """

    makes: Sequence[int]
    reads: frozenset[int]
    num_bytes: float = 0.0


@dataclass
class Region:
    """The program's kernels, or those of a loop's body.

    Attributes:
        nodes: They, by name.
        size: Bytes of each value.
        ends: Values that are there to the end.
    """

    nodes: dict[int, Node]
    size: Sequence[float]
    ends: Iterable[int]
    maker: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.maker = {v: name for name, node in self.nodes.items() for v in node.makes}
        self.ends = [v for v in self.ends if v in self.maker]
        self.before = {
            name: list(dict.fromkeys(self.maker[v] for v in sorted(node.reads) if self.maker.get(v, name) != name))
            for name, node in self.nodes.items()
        }

    def best(self) -> tuple[list[int], float]:
        """The better order, and the most memory it takes."""
        first = self.depth_first()
        return min(((order, self.peak(order)) for order in (first, self.greedy(first))), key=lambda pair: pair[1])

    def depth_first(self) -> list[int]:
        """Depth first from the ends; what none of them needs is left out."""
        roots = [self.maker[v] for v in self.ends]
        plain = _walk(roots, self.before)
        fan_out: dict[int, int] = dict.fromkeys(plain, -1)
        for name in plain:
            for other in self.before[name]:
                fan_out[other] += 1
        behind: dict[int, int] = {}
        sizes: dict[int, float] = {}
        whole = 0.0
        for number, name in enumerate(plain, 1):
            own = sum(self.size[v] for v in self.nodes[name].makes)
            whole += own
            behind[name] = min(max(fan_out[name], 0) + sum(behind[q] for q in self.before[name]), number)
            sizes[name] = min(own + sum(sizes[q] for q in self.before[name]), whole)

        def most(names: Iterable[int]) -> list[int]:
            return sorted(names, key=lambda q: (-behind[q], -sizes[q], q))

        return _walk(most(dict.fromkeys(roots)), {name: most(self.before[name]) for name in plain})

    def greedy(self, names: Sequence[int]) -> list[int]:
        """Of those that are ready, always the one that gives most memory back."""
        readers: dict[int, set[int]] = {}
        for name in names:
            for v in self.nodes[name].reads:
                if v in self.maker:
                    readers.setdefault(v, set()).add(name)
        kept = set(self.ends)
        users = {name: len(set().union(*(readers.get(v, ()) for v in self.nodes[name].makes))) for name in names}
        waits = {name: len(self.before[name]) for name in names}
        after: dict[int, list[int]] = {}
        for name in names:
            for q in self.before[name]:
                after.setdefault(q, []).append(name)

        def priority(name: int) -> tuple[float, int]:
            node = self.nodes[name]
            freed = sum(self.size[v] for v in node.reads if v not in kept and readers.get(v) == {name})
            return node.num_bytes + sum(self.size[v] for v in node.makes) - freed, -users[name]

        ready = [(priority(name), name) for name in names if not waits[name]]
        heapify(ready)
        order: list[int] = []
        done: set[int] = set()
        while ready:
            key, name = heappop(ready)
            if name in done:
                continue
            if (now := priority(name)) < key:
                heappush(ready, (now, name))
                continue
            done.add(name)
            order.append(name)
            for v in self.nodes[name].reads:
                left = readers.get(v)
                if left is not None:
                    left.discard(name)
                    if len(left) == 1 and not waits[last := next(iter(left))]:
                        heappush(ready, (priority(last), last))
            for q in after.get(name, ()):
                waits[q] -= 1
                if not waits[q]:
                    heappush(ready, (priority(q), q))
        return order

    def peak(self, order: Sequence[int]) -> float:
        """The most that is in memory of what these make."""
        left = {v: 0 for name in order for v in self.nodes[name].makes}
        for name in order:
            for v in self.nodes[name].reads:
                if v in left:
                    left[v] += 1
        for v in self.ends:
            left[v] += 1
        now = most = 0.0
        for name in order:
            node = self.nodes[name]
            now += sum(self.size[v] for v in node.makes)
            most = max(most, now + node.num_bytes)
            for v in node.reads:
                if v in left:
                    left[v] -= 1
                    now -= self.size[v] * (left[v] == 0)
            now -= sum(self.size[v] for v in node.makes if left[v] == 0)
        return most


def _walk(roots: Iterable[int], before: dict[int, list[int]]) -> list[int]:
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
