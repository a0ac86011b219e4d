"""How often the kernels of a step read and write each value in memory.

A kernel computes one value or several that are in memory, and internally the values that lead to them. These rules of
XLA's GPU compiler were derived from the programs that it made of ten training steps:

- A kernel reads a value once, however many of its operations do. A value that kernels compute internally is computed
  in each kernel that needs it, and each of them reads the operands.
- **Priority fusion.** A value is stored instead if that moves fewer bytes than computing it in each kernel does.
- **Multi-output fusion.** Kernels over the same elements that share an operand, or of which one reads what the other
  writes, are one kernel, unless one waits for a third kernel that runs after the other.
- A kernel in which operands of different orders of dims meet transposes them, and cannot reduce the result as well.
- Rows that are reduced are read row by row: rows that do not start at a cache line touch one line more.
- A value that is read in another loop or branch than it is computed in is in memory.
"""

from math import gcd
from typing import NamedTuple

import numpy as np

from meshwright.arrays import Bools, Floats, Ints
from meshwright.cost.xla_gpu.dim_orders import Orders
from meshwright.cost.xla_gpu.fusion import Fusion
from meshwright.graph.facts import Facts
from meshwright.graph.graph import Graph
from meshwright.jit import kernel
from meshwright.rules.base import Signature

TAKING = ("gather", "slice", "dynamic_slice", "loop_slice")  # read no more of their first operand than their result
_IN_PLACE = ("scatter", "select_and_scatter")  # change their first operand where it is
_LINE, _SECTOR = 128, 32  # bytes of a cache line of a GPU, and of what is read of it at once
_MANY = 64  # kernels that need a value; more make no difference


class Traffic(NamedTuple):
    """What the kernels of a step do with memory.

    Attributes:
        reads: For each read of an operation, how often kernels read the operand because of it; a part of it counts as
            a fraction.
        writes: How often each value is written.
        computed: For each operation, how many kernels compute it.
        starts: Whether each operation stands for a kernel; others are computed in the kernels of others.
    """

    reads: Floats
    writes: Floats
    computed: Ints
    starts: Bools


def plain_traffic(graph: Graph) -> Traffic:
    """The traffic if every operation is a kernel of its own."""
    stored = np.ones(graph.columns.num_values, bool)
    stored[list(graph.constants)] = False
    each = np.ones(len(graph.columns.signature), np.int64)
    return Traffic(stored[graph.columns.reads] * 1.0, stored * 1.0, each, each > 0)


def traffic(facts: Facts, found: Fusion, num_devices: int | None = None) -> Traffic:
    """Finds the kernels, and what each of them reads and writes.

    Args:
        facts: The graph.
        found: Which values are in memory because some kernel cannot be fused.
        num_devices: The number of devices that share the batch; None where that is not known.
    """
    columns, graph = facts.columns, facts.graph
    stored = found.kept.copy()
    stored[[*graph.outputs, *(value for value, _ in found.apart)]] = True
    elsewhere = graph.body[columns.producer[columns.reads]] != graph.body[columns.reader]
    stored[columns.reads[elsewhere & ~facts.cut_out[columns.producer[columns.reads]]]] = True
    stored[list(graph.constants)] = False
    torn = _torn(facts, stored, num_devices)
    stored |= torn
    by_value = np.argsort(columns.reads, kind="stable")
    first_user = np.searchsorted(columns.reads[by_value], np.arange(columns.num_values + 1))
    ops = (columns.reads, columns.start, columns.first_made, columns.num_made, columns.producer, facts.fusible)
    taken, size = _taken(facts), graph.num_bytes.astype(np.float64)
    _store(*ops, columns.reader[by_value], first_user, taken, size, graph.sizes, stored)
    computed = np.zeros(len(columns.signature), np.int64)
    by, read, part = _read(*ops, taken, graph.sizes, stored, computed)
    joined = _join(*ops, by, read, _reduced(facts), graph.body, torn, graph.sizes)
    starts = np.zeros(len(computed), bool)
    starts[joined[np.unique(by)]] = True
    reads, lines = _weights(columns.reads, columns.producer, joined, by, read, part), _lines(facts)
    return Traffic(reads * lines[columns.reads], stored * lines, computed, starts)


def _torn(facts: Facts, stored: Bools, num_devices: int | None) -> Bools:
    """The values that reductions read and whose kernels transpose."""
    columns, orders = facts.columns, Orders(facts)
    if num_devices is not None:
        orders.relay(facts, num_devices)
    ops = (columns.reads, columns.start, columns.first_made, columns.num_made, facts.fusible)
    reduced = np.zeros(columns.num_values, bool)
    reduced[columns.reads[facts.where(lambda name, _: name.startswith("reduce_"))[columns.reader]]] = True
    return _transposed(*ops, orders.transposing(), reduced, stored)


@kernel
def _transposed(reads, begin, first_made, num_made, fusible, transposing, reduced, stored):
    """Whether each value is reduced, and computed by a kernel that transposes.

    Args:
        reads, begin, first_made, num_made: The operands and results of operations.
        fusible: The operations that are fused to their readers.
        transposing: The operations that transpose operands.
        reduced, stored: The values that reductions read, and the values that are in memory.
    """
    inside, found = np.zeros(len(stored), np.bool_), np.zeros(len(stored), np.bool_)
    for i in range(len(first_made)):
        turns = transposing[i]
        for k in range(begin[i], begin[i + 1]):
            turns = turns or (inside[reads[k]] and not stored[reads[k]] and not found[reads[k]])
        if fusible[i]:
            for value in range(first_made[i], first_made[i] + num_made[i]):
                inside[value], found[value] = turns, turns and reduced[value]
    return found


def _lines(facts: Facts) -> Floats:
    """For each value the bytes of the cache lines that kernels touch, relative to its own."""
    rows = {}
    for number in facts.columns.examples:
        op = facts.columns.signatures[number]
        if (
            op.primitive.startswith("reduce_")
            and op.operands[0].shape
            and len(op.operands[0].shape) - 1 in op.params.get("axes", ())
        ):
            rows[op.operands[0].shape] = op.operands[0].shape[-1]
    sizes = [rows.get(kind.shape, 0) * kind.itemsize for kind in facts.graph.kinds]
    return np.array([1 + (_LINE - gcd(size, _LINE)) / max(size, _LINE) for size in sizes])[facts.graph.kind]


def _taken(facts: Facts) -> Floats:
    """For each operation, the part of its first operand that it reads."""
    part = np.ones(len(facts.columns.signatures))
    for number in facts.columns.examples:
        op = facts.columns.signatures[number]
        if op.primitive in TAKING:
            part[number] = min(1.0, _beside(op) * op.results[0].num_bytes / max(op.operands[0].num_bytes, 1))
        elif op.primitive.startswith(_IN_PLACE):
            part[number] = 0.0
    return part[facts.columns.signature]


def _beside(op: Signature) -> int:
    """How many elements come with each that is read: memory is read in sectors, and strides along rows skip in them."""
    if op.primitive != "slice" or not op.params["strides"]:
        return 1
    return min(op.params["strides"][-1], max(_SECTOR // max(op.operands[0].itemsize, 1), 1))


def _reduced(facts: Facts) -> Ints:
    """A number for how each operation reduces; 0 for elementwise ones, -1 for those that are fused with no other."""
    known: dict[tuple[tuple[int, str], ...], int] = {}
    found = np.full(len(facts.columns.signatures), -1)
    for number, index in facts.columns.examples.items():
        nest, name = facts.nests[index], facts.columns.signatures[number].primitive
        if nest.fusible:
            found[number] = 0
        elif name.startswith("reduce_"):
            kinds = tuple((loop.size, "" if loop.kind == "parallel" else "reduced") for loop in nest.loops)
            found[number] = known.setdefault(kinds, 1 + len(known))
    return found[facts.columns.signature]


def _weights(reads: Ints, producer: Ints, joined: Ints, by: Ints, read: Ints, part: Floats) -> Floats:
    """How often each read of an operation goes to memory: each kernel reads a value once, and never one of its own."""
    value = reads[read]
    maker = producer[value]
    outside = (maker < 0) | (joined[maker] != joined[by])
    by, read, part, value = by[outside], read[outside], part[outside], value[outside]
    order = np.lexsort((-part, value, joined[by]))
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(value[order]) != 0) | (np.diff(joined[by][order]) != 0)
    return np.bincount(read[order][first], part[order][first], len(reads)).astype(np.float64)


@kernel
def _store(reads, begin, first_made, num_made, producer, fusible, users, first_user, taken, size, elements, stored):
    """Stores values, in order, where that moves fewer bytes than computing them in every kernel that needs them.

    A value with one reader is left to that reader, unless the reader's result is larger.

    Args:
        reads, begin, first_made, num_made: The operands and results of operations.
        producer: The operation that computes each value, or -1.
        fusible: Whether each operation is fused to its readers.
        users, first_user: The operations that read each value.
        taken: The part of its first operand that each operation reads.
        size, elements: Bytes and elements of each value.
        stored: Whether each value is in memory, to be changed.
    """
    num_ops, given = len(first_made), stored.copy()
    seen, met = np.full(num_ops, -1), np.full(len(producer), -1)
    stack, parts = np.empty(num_ops + 1, np.int64), np.empty(num_ops + 1)
    for turn in range(2 * num_ops):
        i = turn if turn < num_ops else 2 * num_ops - 1 - turn
        value = first_made[i]
        if given[value] or not fusible[i] or num_made[i] != 1 or elements[value] == 1:
            continue
        only = users[first_user[value]] if first_user[value + 1] - first_user[value] == 1 else -1
        if only >= 0 and fusible[only] and size[first_made[only]] <= size[value]:
            continue
        stored[value] = False
        needed, waiting, stack[0] = 0, 1, value
        while waiting and needed < _MANY:
            waiting -= 1
            at = stack[waiting]
            for k in range(first_user[at], first_user[at + 1]):
                user = users[k]
                if seen[user] == turn:
                    continue
                seen[user] = turn
                if fusible[user] and num_made[user] == 1 and not stored[first_made[user]]:
                    stack[waiting] = first_made[user]
                    waiting += 1
                else:
                    needed += 1
        source, waiting, stack[0], parts[0] = 0.0, 1 if needed > 1 else 0, i, 1.0
        while waiting:
            waiting -= 1
            at, part = stack[waiting], parts[waiting]
            for k in range(begin[at], begin[at + 1]):
                read, share = reads[k], part * taken[at] if k == begin[at] else part
                if met[read] == turn:
                    continue
                met[read] = turn
                if stored[read]:
                    source += size[read] * share
                elif producer[read] >= 0 and elements[read] > 1:
                    stack[waiting], parts[waiting] = producer[read], share
                    waiting += 1
        stored[value] = (needed - 1) * source > (needed + 1) * size[value]


@kernel
def _read(reads, begin, first_made, num_made, producer, fusible, taken, elements, stored, computed):
    """The values in memory that each kernel reads: the kernel's last operation, which read it is, and how much of it.

    Args:
        reads, begin, first_made, num_made, producer, fusible, taken, elements, stored: As in `_store`.
        computed: How many kernels compute each operation, to be counted.
    """
    by, found, part = [0], [0], [0.0]
    num_ops = len(first_made)
    seen = np.full(num_ops, -1)
    stack, parts = np.empty(num_ops + 1, np.int64), np.empty(num_ops + 1)
    for i in range(num_ops):
        if fusible[i] and not stored[first_made[i] : first_made[i] + num_made[i]].any():
            continue
        waiting, stack[0], parts[0], seen[i] = 1, i, 1.0, i
        while waiting:
            waiting -= 1
            at, share = stack[waiting], parts[waiting]
            computed[at] += 1
            for k in range(begin[at], begin[at + 1]):
                maker, first = producer[reads[k]], k == begin[at]
                if stored[reads[k]]:
                    by.append(i)
                    found.append(k)
                    part.append(0.0 if first and taken[at] == 0.0 else share)
                elif maker >= 0 and seen[maker] != i and elements[reads[k]] > 1:
                    seen[maker] = i
                    stack[waiting], parts[waiting] = maker, share * taken[at] if first else share
                    waiting += 1
    return np.array(by)[1:], np.array(found)[1:], np.array(part)[1:]


@kernel
def _join(reads, begin, first_made, num_made, producer, fusible, by, read, reduced, body, torn, elements):
    """For each operation that ends a kernel the first of those that are one kernel with it.

    Args:
        reads, begin, first_made, num_made, producer, fusible, elements: As in `_store`.
        by, read: The operations that end kernels, in order, and what these read from memory.
        reduced: How each operation reduces; 0 for elementwise ones, -1 for those that are fused with no other.
        body: The loop or branch of each operation.
        torn: The values whose kernels transpose.
    """
    joined = np.arange(len(first_made))
    kind, space = reduced.copy(), np.zeros(len(first_made), np.int64)
    transposes = np.zeros(len(first_made), np.bool_)
    last_reader, before = np.full(len(producer), -1), np.full(len(by), -1)  # the kernels that read a value, as a list
    stop = 0
    for start in range(len(by)):
        if start < stop:
            continue
        i = by[start]
        while stop < len(by) and by[stop] == i:
            stop += 1
        if reduced[i] < 0:
            continue
        transposes[i] = torn[first_made[i]]
        space[i] = elements[first_made[i]]
        for k in range(begin[i], begin[i + 1]):
            space[i] = max(space[i], elements[reads[k]])
        best = -1
        for row in range(start, stop):
            value = reads[read[row]]
            if elements[value] < space[i]:
                continue
            near = producer[value]
            place = last_reader[value]
            while near >= 0 or place >= 0:
                if near < 0:
                    near, place = by[place], before[place]
                other, near = joined[near], -1
                alike = kind[other] >= 0 and space[other] == space[i] and body[other] == body[i]
                if kind[other] != 0 and reduced[i] != 0:
                    alike = alike and kind[other] == reduced[i]
                if other <= best or not alike or (transposes[other] and reduced[i] != 0):
                    continue
                for k in range(start, stop):
                    maker = producer[reads[read[k]]]
                    alike = alike and (maker < other or (joined[maker] == other and fusible[maker]))
                if alike:
                    best = other
        if best >= 0:
            joined[i] = best
            kind[best] = max(kind[best], reduced[i])
            transposes[best] |= transposes[i]
        for row in range(start, stop):
            value = reads[read[row]]
            if elements[value] >= space[i]:
                before[row], last_reader[value] = last_reader[value], row
    return joined
