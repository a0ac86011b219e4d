"""Which values XLA's GPU backend keeps in memory, and which values its kernels compute internally.

The rules were derived from the programs that it compiles:

- Operands and results of a kernel that cannot be fused are in memory; cheap elementwise operations are fused into
  kernels and recomputed in each reader. Reductions and gathers fuse the producers of their operands.
- The result of an expensive operation with several readers is stored once. A GPU has instructions for exponentials,
  quotients and roots: these are not expensive (XLA's `GpuInstructionFusion::IsExpensive`).
- Products read matrices: dims that a product merges must be adjacent. A value computed in another order of dims is
  recomputed for each product that would have to transpose it, each in the order it needs.
- A product reads its operands through operations on one value, such as a rectifier or an exponential: their result is
  not in memory between the products that read it, while the value that it is made of is.
- A look-up is computed by the kernels that read it, and a scatter computes its updates. Where the scatter's result is
  added to a value, XLA scatters into that value; what is looked up in the same value is in memory then.
- A kernel evaluates a value once for each index at which it reads it: once for every slice and every part of a
  concatenation on the way, and what those read again for each of theirs. XLA writes a value for which a kernel would
  evaluate another more than 15 times (`FusionNodeIndexingEvaluation`): every second level of an associative scan.
- An elementwise kernel overwrites an operand of the same size that it is the last to read.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshwright.arrays import Bools, Ints
from meshwright.cost.xla_gpu.dim_orders import Orders
from meshwright.graph.facts import COSTLY, Facts
from meshwright.jit import kernel, pause

_QUICK = frozenset({"exp", "exp2", "logistic", "div", "sqrt", "rsqrt"})
_RESHAPING = frozenset({"reshape", "squeeze", "expand_dims"})
_MOVING = ("slice", "dynamic_slice", "split", "pad", "concatenate", "rev")  # read at another index than they write
_MOST_EVALUATED = 15  # XLA's own limit: kAllowedCodeDuplication of its fusion passes
_MOST_AGAIN = 64  # the most operations of a kernel that are searched for where it reads a value


class Fusion(NamedTuple):
    """Which values are in memory.

    Attributes:
        stored: Whether a value is written to memory at some time.
        kept: Whether it is there until its last reader; otherwise readers recompute it.
        fuses: For each operation, whether it fuses the producers of its operands.
        apart: Values that several products read, each in its own order, and these products.
        passing: Values that are in memory while a kernel reads them, but not between these kernels.
    """

    stored: Bools
    kept: Bools
    fuses: Bools
    apart: list[tuple[int, int]]
    passing: Bools


def fuse(facts: Facts) -> Fusion:
    """Finds which values are in memory, and which are recomputed."""
    fuses = facts.fusible | facts.where(lambda name, _: name.startswith(("reduce_", "arg")))
    if not facts.graph.on_cpu:  # where a scatter is a loop
        fuses |= facts.where(lambda name, _: name.startswith("scatter"))
    stored = _in_memory(facts, fuses)
    stored[_shared(facts, COSTLY, stored)] = True
    fuses |= facts.where(lambda name, _: name == "gather")
    kept = _in_memory(facts, fuses)
    costly = _shared(facts, COSTLY - _QUICK, kept)
    kept[costly] = True
    often = _evaluated_often(facts, kept)
    stored |= often
    kept |= often
    looked_up = _looked_up_where_added(facts)
    stored[looked_up] = kept[looked_up] = True
    apart = list(_apart(facts, kept, fuses))
    kept[[value for value, _ in apart]] = False
    passing = _made_again_by_readers(facts, fuses)
    passing[costly] = False
    passing[often] = False
    return Fusion(stored, kept, fuses, apart, passing)


def _in_memory(facts: Facts, fuses: Bools) -> Bools:
    """The values that some kernel reads or writes if everything that can be recomputed is."""
    found = np.zeros(facts.columns.num_values, bool)
    found[facts.made] = ~facts.fusible[facts.maker]
    found[facts.columns.reads[~fuses[facts.columns.reader]]] = True
    scatters = facts.where(lambda name, _: name.startswith("scatter"))
    found[facts.columns.reads[facts.columns.start[:-1][scatters]]] = True
    found[[*facts.graph.inputs, *facts.ends]] = True
    found[list(facts.graph.constants)] = False
    return found


def _looked_up_where_added(facts: Facts) -> Ints:
    """What is looked up in values into which a scatter adds: XLA makes one scatter of it and of the sum that follows.

    A kernel that changes a value cannot look up in it as well.
    """
    columns = facts.columns
    adds = facts.where(lambda name, _: name in ("add", "add_any"))
    sums = np.append(facts.where(lambda name, _: name.startswith(("scatter-add", "scatter_add"))), False)
    ones = np.flatnonzero(adds[columns.reader] & sums[columns.producer[columns.reads]])
    ones = ones[facts.num_readers[columns.reads[ones]] == 1]
    first = columns.start[columns.reader[ones]]
    others = columns.reads[2 * first + 1 - ones]
    gathers = np.flatnonzero(facts.where(lambda name, _: name == "gather"))
    return columns.first_made[gathers[np.isin(columns.reads[columns.start[gathers]], others)]]


def _evaluated_often(facts: Facts, kept: Bools) -> Bools:
    """The values that are written because a kernel that computed them would evaluate some value too often."""
    columns, found = facts.columns, np.zeros(facts.columns.num_values, bool)
    moving = facts.where(lambda name, _: name in _MOVING)
    if moving.any():
        ops = columns.reads, columns.start, columns.first_made, columns.num_made, columns.producer
        _store_evaluated(*ops, facts.fusible, moving, kept, _MOST_EVALUATED, found)
    return found


@kernel(pauses=True)  # chains of many thousand operations are followed from each of them
def _store_evaluated(reads, begin, first_made, num_made, producer, fusible, moving, kept, most, found):
    """Stores, in order, values for which a kernel would evaluate some value more often than `most`.

    Args:
        reads, begin, first_made, num_made, producer: The operations and what they read and make.
        fusible: The operations that are fused to their readers.
        moving: The operations that read at other indices than they write.
        kept: The values that are in memory anyway.
        most: The limit.
        found: The values that are stored, to be changed.
    """
    num_ops = len(first_made)
    evaluated, seen = np.ones(num_ops, np.int64), np.full(num_ops, -1)
    stack = np.empty(num_ops + 1, np.int64)
    for i in range(num_ops):
        if not fusible[i]:
            continue
        pause()
        total, waiting, stack[0] = 0, 1, i
        while waiting and total <= most:
            waiting -= 1
            at = stack[waiting]
            for k in range(begin[at], begin[at + 1]):
                maker = producer[reads[k]]
                if maker < 0 or kept[reads[k]] or found[reads[k]] or not fusible[maker]:
                    total += moving[at]
                elif moving[at]:
                    total += evaluated[maker]
                elif seen[maker] != i:
                    seen[maker] = i
                    stack[waiting] = maker
                    waiting += 1
        evaluated[i] = max(total, 1)
        if total > most:
            found[first_made[i] : first_made[i] + num_made[i]] = True


def _made_again_by_readers(facts: Facts, fuses: Bools) -> Bools:
    """The values that all readers make again from values in memory, on GPUs.

    Products do so with what follows from one value that is not larger.
    """
    columns, graph = facts.columns, facts.graph
    found = np.zeros(columns.num_values, bool)
    if graph.on_cpu:
        return found
    alone, source = _only_read(facts, graph.sizes[columns.reads] > 1)
    alone &= graph.num_bytes[source] <= graph.num_bytes[columns.first_made % columns.num_values]
    ends = _ends(facts)
    for index in np.flatnonzero(alone).tolist():
        found[columns.first_made[index]] = ends[source[index]] or found[source[index]]
    found &= ~_in_memory(facts, fuses | facts.where(lambda name, _: name == "dot_general"))
    return found


def _ends(facts: Facts) -> Bools:
    """The values that are in memory where something that follows from them is made again.

    A product adds a bias, or scales, before it writes: what that gives is in memory as its own result would be.
    """
    columns, graph = facts.columns, facts.graph
    found = np.append(~facts.fusible, True)[columns.producer]
    spread = np.append(facts.where(lambda name, _: name == "broadcast_in_dim"), False)[columns.producer]
    added, source = _only_read(facts, (graph.sizes[columns.reads] > 1) & ~spread[columns.reads])
    found[columns.first_made[added & np.append(facts.contracts, False)[columns.producer[source]]]] = True
    return found


def _only_read(facts: Facts, some: Bools) -> tuple[Bools, Ints]:
    """The fusible operations that have one of some reads, and the value that each of them reads there."""
    columns, num_ops = facts.columns, len(facts.columns.signature)
    source = np.zeros(num_ops, np.int64)
    source[columns.reader[some]] = columns.reads[some]
    return facts.fusible & (columns.num_made == 1) & (np.bincount(columns.reader[some], minlength=num_ops) == 1), source


def _shared(facts: Facts, names: frozenset[str], stored: Bools) -> list[int]:
    """Results of some primitives that have several readers and are not stored yet, in the order they are computed."""
    found = facts.made[facts.where(lambda name, _: name in names)[facts.maker]]
    found = found[(facts.num_readers[found] > 1) & ~stored[found]]
    return found[np.argsort(facts.columns.producer[found])].tolist()


def _apart(facts: Facts, kept: Bools, fuses: Bools) -> Iterator[tuple[int, int]]:
    """Values that only transposing products read, each with these products, if there are several."""
    columns, orders = facts.columns, Orders(facts)
    products = facts.where(lambda name, _: name == "dot_general")
    reads = products[columns.reader] & kept[columns.reads]
    several = np.flatnonzero(np.bincount(columns.reads[reads], minlength=columns.num_values) > 1)
    several = several[columns.producer[several] >= 0]
    several = orders.may_differ(several[facts.fusible[columns.producer[several]]])
    several = np.setdiff1d(several, facts.ends)
    places = np.flatnonzero(np.isin(columns.reads, several) & ~fuses[columns.reader])
    by = columns.reader[places]
    several = np.setdiff1d(several, columns.reads[places[~products[by]]])
    readers: dict[int, list[tuple[int, int]]] = {value: [] for value in several.tolist()}
    sides = places - columns.start[by]
    for value, index, side in zip(columns.reads[places].tolist(), by.tolist(), sides.tolist(), strict=True):
        if value in readers:
            readers[value].append((index, side))
    for value, reading in readers.items():
        if orders.all_transpose(value, reading):
            yield from ((value, index) for index, _ in reading)


def written_over(facts: Facts, kept: Bools, start: Ints, stop: Ints, runs: Ints) -> tuple[list[int], list[int]]:
    """Values that elementwise kernels overwrite, being their last readers, and the value that each writes there."""
    graph, columns = facts.graph, facts.columns
    late = np.zeros(columns.num_values, bool)
    late[columns.reads[(runs > np.arange(len(runs)))[columns.reader]]] = True
    values = np.flatnonzero(kept & ~late & (columns.producer >= 0) & (stop > start + 1))
    by = stop[values] - 1
    made, width = columns.first_made[by], np.array([kind.itemsize for kind in graph.kinds])[graph.kind]
    fits = facts.fusible[by] & kept[made] & (start[made] == by)
    fits &= (graph.sizes[made] == graph.sizes[values]) & (width[made] == width[values])
    fits &= columns.trips[by] == columns.trips[columns.producer[values]]
    maker = np.where(kept, -1, columns.producer)  # of values that kernels compute internally
    values, by, made = values[fits], by[fits], made[fits]
    in_place = _read_in_place(columns.reads, columns.start, _alike(facts), maker, by, values)
    made, first = np.unique(made[in_place], return_index=True)
    return values[in_place][first].tolist(), made.tolist()


def _alike(facts: Facts) -> Bools:
    """For each read, whether its operation can be fused and reads it element for element as it writes its result."""
    columns = facts.columns
    known: list[bool] = []
    first = np.zeros(len(columns.signatures), np.int64)
    for number, example in columns.examples.items():
        first[number] = len(known)
        known += _read_alike(facts, example)
    operand = np.arange(len(columns.reads)) - columns.start[columns.reader]
    return np.array(known, bool)[first[columns.signature[columns.reader]] + operand]


def _read_alike(facts: Facts, index: int) -> list[bool]:
    """Which operands an operation reads element for element as it writes its result; none if it cannot be fused."""
    if not facts.fusible[index] or facts.columns.primitive(index) in _RESHAPING:
        return [bool(facts.fusible[index])] * len(facts.columns.reads_of(index))
    nest = facts.nests[index]
    plain = all(nest.loops[loop].kind == "parallel" for dim in nest.results[0] for loop in dim)
    return [plain and dims == nest.results[0] for dims in nest.operands]


@kernel
def _read_in_place(reads, begin, alike, maker, ops, values):
    """For each operation, whether its kernel reads a value, and only at the element that it writes.

    Args:
        reads, begin: The operands of operations.
        alike: For each read, whether it is element for element as its operation writes its result.
        maker: The operation that computes a value; -1 if the value is in memory.
        ops, values: The operations, and one value for each.
    """
    found = np.zeros(len(ops), np.bool_)
    seen, seen_alike = np.empty(_MOST_AGAIN, np.int64), np.empty(_MOST_AGAIN, np.bool_)
    most = _MOST_AGAIN * np.diff(begin).max() + 1 if len(ops) else 0
    stack, stack_alike = np.empty(most, np.int64), np.empty(most, np.bool_)
    for i in range(len(ops)):
        num_seen, reached, waiting = 0, False, 1
        stack[0], stack_alike[0] = ops[i], True
        while waiting:
            waiting -= 1
            at, same = stack[waiting], stack_alike[waiting]
            known = False
            for k in range(num_seen):
                known |= seen[k] == at and seen_alike[k] == same
            if known:
                continue
            if num_seen == _MOST_AGAIN:
                reached = False
                break
            seen[num_seen], seen_alike[num_seen] = at, same
            num_seen += 1
            torn = False
            for k in range(begin[at], begin[at + 1]):
                if reads[k] == values[i]:
                    torn |= not (same and alike[k])
                    reached = True
                elif maker[reads[k]] >= 0:
                    stack[waiting], stack_alike[waiting] = maker[reads[k]], same and alike[k]
                    waiting += 1
            if torn:
                reached = False
                break
        found[i] = reached
    return found
