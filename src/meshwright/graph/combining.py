"""Which reductions over devices XLA's CPU backend makes one: those over the same axes that do not need one another.

It walks over a program depth first and takes reductions together until one of them needs what was taken; then it
begins anew with those that are left. So all gradients of weights are reduced together, and with them perhaps what
comes late in the backward pass: until then everything they are made from is in memory.
"""

from collections.abc import Hashable, Mapping, Sequence

from meshwright.graph.orders import Node, walk


def combine(nodes: Mapping[int, Node], ends: Sequence[int], keys: Mapping[int, Hashable]) -> list[list[int]]:
    """Groups some nodes, the reductions, as they are combined; those that no end needs are left out.

    Args:
        nodes: All kernels and reductions, by name.
        ends: Values that are there to the end.
        keys: For each reduction what must be alike.
    """
    left, groups = dict(keys), list[list[int]]()
    name_of = {name: name for name in nodes}  # combined ones have the name of the first
    reads = {name: list(node.reads) for name, node in nodes.items()}
    maker = {v: name for name, node in nodes.items() for v in node.makes}
    while left:
        before = _before(reads, maker, name_of)
        order = walk([name_of[maker[v]] for v in ends if v in maker], before)
        bit = {name: 1 << n for n, name in enumerate(name for name in order if name in left)}
        needs: dict[int, int] = {}
        for name in order:
            found = 0
            for other in before[name]:
                found |= needs[other] | bit.get(other, 0)
            needs[name] = found
        waiting = [name for name in order if name in left]
        if not waiting:
            break
        combined = False
        while waiting and not combined:
            key, taken, bits = left[waiting[0]], list[int](), 0
            for name in waiting:
                if left[name] != key:
                    continue
                if needs[name] & bits:
                    break
                taken.append(name)
                bits |= bit[name]
            for name in taken:
                del left[name]
            waiting = [name for name in waiting if name in left]
            groups.append(taken)
            combined = len(taken) > 1
        if combined:
            first = groups[-1][0]
            for name in groups[-1][1:]:
                reads[first] += reads.pop(name)
                name_of = {old: first if new == name else new for old, new in name_of.items()}
    return groups


def _before(
    reads: Mapping[int, Sequence[int]], maker: Mapping[int, int], name_of: Mapping[int, int]
) -> dict[int, list[int]]:
    """For each name those that make what it reads, in order."""
    return {
        name: list(dict.fromkeys(m for v in values if v in maker and (m := name_of[maker[v]]) != name))
        for name, values in reads.items()
    }
