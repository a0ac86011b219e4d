"""Where a train step has barriers that keep the gradients of one layer's weights from waiting for those of all others.

XLA computes a gradient that is reduced over devices just before it is read, to overlap it with other reductions, and
until then keeps what it is computed from, whether or not that was checkpointed. A barrier over a gradient that the
backward pass hands on and the gradients of weights before it ends the wait: the backward pass goes on only when they
are there. Barriers are where the backward pass hands on the fewest bytes, which is between layers. Each takes the
gradients of the layer before the last one, so that the reductions of a layer overlap the layer after it.
"""

from itertools import pairwise

import numpy as np

from meshwright.arrays import Bools, Ints
from meshwright.graph.facts import Facts
from meshwright.graph.phases import BACKWARD, PHASES

_BEHIND = 1  # layers whose reductions may be under way when the backward pass of a layer begins


def layer_barriers(facts: Facts, gradients: Ints, waits: Bools) -> Ints:
    """For each operation the one before which its result passes a barrier; -1 where it passes none.

    Args:
        facts: Facts about the graph.
        gradients: The values that no operation of the backward pass reads.
        waits: The operations that wait until the update reads such a value.
    """
    columns, size = facts.columns, len(facts.columns.signature)
    is_gradient = np.zeros(size, bool)
    is_gradient[columns.producer[gradients]] = True
    backward = (columns.phase == PHASES.index(BACKWARD)) & (columns.num_made == 1)
    until = np.full(columns.num_values, -1)
    reads = (columns.phase == PHASES.index(BACKWARD))[columns.reader]
    np.maximum.at(until, columns.reads[reads], columns.reader[reads])
    until, region, found = until[columns.first_made], _regions(facts), np.full(size, -1)
    for number in np.unique(region[is_gradient]).tolist():
        inside = backward & (region == number)
        handed_on = np.flatnonzero(inside & ~is_gradient & ~waits)
        made = np.flatnonzero(inside & is_gradient)
        handed_on = handed_on[until[handed_on] > handed_on]
        places = _narrow(facts, handed_on, until[handed_on], made, np.flatnonzero(inside))
        following = np.append(places, size)[np.searchsorted(places, handed_on, side="right")]
        crossing = following <= until[handed_on]
        found[handed_on[crossing]] = following[crossing]
        places = np.unique(following[crossing])
        late = np.searchsorted(places, made, side="right") + _BEHIND
        found[made[late < len(places)]] = places[late[late < len(places)]]
    return found


def _regions(facts: Facts) -> Ints:
    """The innermost loop or branch of each operation; the entries and results of loops have none."""
    found = np.full(len(facts.columns.signature), -1)
    ranges = (*facts.graph.loops, *facts.graph.branches)
    for number, (first, stop) in enumerate(sorted(ranges, key=lambda range_: range_[0] - range_[1])):
        found[first:stop] = number
    found[facts.where(lambda name, _: name.startswith("loop_"))] = -2
    return found


def _narrow(facts: Facts, handed_on: Ints, until: Ints, made: Ints, places: Ints) -> Ints:
    """Of the places between products that make gradients those where fewer bytes are handed on than at others around.

    Args:
        facts: Facts about the graph.
        handed_on, until: Operations whose results the backward pass reads, and the last one that reads each.
        made: The operations that make gradients.
        places: The operations before which a barrier may be.
    """
    columns = facts.columns
    num_bytes = facts.graph.num_bytes[columns.first_made[handed_on]].astype(np.int64)
    change = np.zeros(len(columns.signature) + 1, np.int64)
    np.add.at(change, handed_on + 1, num_bytes)
    np.add.at(change, until + 1, -num_bytes)
    crossing = np.cumsum(change)[places]
    parts = np.unique(np.searchsorted(places, made[_is_product(facts, made)], side="right"))
    least = [(int(crossing[a:b].min()), int(places[a + crossing[a:b].argmin()])) for a, b in pairwise(parts.tolist())]
    least = [one for one in least if one[0]]  # after the last layer nothing is handed on
    around = [least[i - 1 : i] + least[i + 1 : i + 2] for i in range(len(least))]
    chosen = [place for (b, place), near in zip(least, around, strict=True) if all(b <= other for other, _ in near)]
    return np.array(chosen, np.int64)


def _is_product(facts: Facts, made: Ints) -> Bools:
    """Whether operations are products, or compute their results from products of the same size without a kernel."""
    columns, size = facts.columns, facts.graph.sizes
    found = np.zeros(len(made), bool)
    for number, index in enumerate(made.tolist()):
        waiting, seen, expected = [index], {index}, size[columns.first_made[index]]
        while waiting and not found[number]:
            at = waiting.pop()
            found[number] = facts.contracts[at]
            if facts.fusible[at]:
                before = [columns.producer[v] for v in columns.reads_of(at).tolist() if size[v] == expected]
                waiting += [one for one in before if one >= 0 and one not in seen]
                seen.update(before)
    return found
