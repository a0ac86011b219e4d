"""Places operations in groups, in one pass: which operand each one follows, and which values are virtual."""

from typing import NamedTuple

import numpy as np

from meshwright.arrays import Bools, Ints
from meshwright.jit import inline, kernel

_EXPANDING = 2  # a result this many times its operands' size is cheaper to recompute than to move
# The most operations that a reader recomputes for a value that depends on real ones: a longer chain is worth computing
# once. The model of fusion searches as many for values that kernels recompute (`cost.xla_gpu.fusion`).
_MOST_AGAIN = 64
_OWN, _STATE, _PARAMETER = 2**62, 2**61, 2**60  # ranks above those of leaders


class Facts(NamedTuple):
    """The facts that placement uses.

    Attributes:
        start, reads: The values that operation ``i`` reads: ``reads[start[i] : start[i + 1]]``.
        first_made, num_made: Its first result, which the others follow, and how many results there are.
        leads: Whether its split is chosen, rather than taken from an operand.
        parallel: Whether all its loops are parallel.
        carries: Whether it is a loop's carry.
        updates: Whether it is part of the update.
        size: Number of elements of each value.
        shape: Number of each value's shape; 0 for scalars.
        returned: Whether a value is a result, or is carried to a loop's next trip.
        state: The argument whose next value it is; -1 for none.
        forward: Whether a value is read before the update.
    """

    start: Ints
    reads: Ints
    first_made: Ints
    num_made: Ints
    leads: Bools
    parallel: Bools
    carries: Bools
    updates: Bools
    size: Ints
    shape: Ints
    returned: Bools
    state: Ints
    forward: Bools


class Placed(NamedTuple):
    """The groups of operations and values; `place` fills them in.

    Attributes:
        group: Group of each operation; -1 for none.
        follows: The operand it follows; -1 for a leader.
        home: Group of each value; -1 for virtual values and scalars.
        virtual: Values that belong to no group.
        rooted: Virtual values that depend on real ones.
        leader: Leading operation of each group; -1 where an argument leads.
        argument: Leading argument of each group; -1 where an operation leads.
    """

    group: Ints
    follows: Ints
    home: Ints
    virtual: Bools
    rooted: Bools
    leader: Ints
    argument: Ints


@kernel
def place(facts, placed, num_groups):
    """Places every operation, given the arguments' groups; returns how many groups there are then."""
    p, q = facts, placed
    again = np.zeros(len(p.size), np.int64)  # operations a reader runs to compute a value; some are counted twice
    for i in range(len(p.leads)):
        begin, end, first = p.start[i], p.start[i + 1], p.first_made[i]
        position, rooted, count = -1, False, 1  # the first real operand
        for k in range(end - 1, begin - 1, -1):
            count = min(count + again[p.reads[k]], _MOST_AGAIN + 1)
            if q.home[p.reads[k]] >= 0:
                position = k - begin
            if q.home[p.reads[k]] >= 0 or q.rooted[p.reads[k]]:
                rooted = True
        usual = position >= 0 and not p.leads[i] and p.size[first] < _EXPANDING * p.size[p.reads[begin + position]]
        short = not rooted or count <= _MOST_AGAIN
        if not usual and short and _is_virtual(p, q, i, position >= 0, rooted):
            for v in range(first, first + p.num_made[i]):
                q.virtual[v] = True
                q.rooted[v] = rooted and p.shape[v] > 0
                again[v] = count if q.rooted[v] else 0
            continue
        if position >= 0 and not p.leads[i]:
            q.follows[i] = _followed(p, q, i)
            q.group[i] = q.home[p.reads[begin + q.follows[i]]]
        elif _has_dims(p, i):
            q.group[i] = num_groups
            q.leader[num_groups] = i
            num_groups += 1
        else:
            continue
        for v in range(first, first + p.num_made[i]):
            if p.shape[v] > 0:
                q.home[v] = q.group[i]
    return num_groups


@inline
def _has_dims(p, i):
    """Whether an operation has an operand or result that is not a scalar."""
    found = False
    for k in range(p.start[i], p.start[i + 1]):
        found |= p.shape[p.reads[k]] > 0
    for v in range(p.first_made[i], p.first_made[i] + p.num_made[i]):
        found |= p.shape[v] > 0
    return found


@inline
def _is_virtual(p, q, i, real, rooted):
    """Whether every reader should compute an operation's results anew."""
    begin, end, made = p.start[i], p.start[i + 1], 0
    for v in range(p.first_made[i], p.first_made[i] + p.num_made[i]):
        made += p.size[v]
        if p.carries[i] or p.returned[v]:
            return False
    if not rooted:  # computed from constants and scalars alone
        for k in range(begin, end):
            if not q.virtual[p.reads[k]] and p.shape[p.reads[k]] == 0:
                return not p.leads[i]
        return True
    if not p.parallel[i]:
        return False
    read = 0
    for k in range(begin, end):
        read += p.size[p.reads[k]]
    return not real or made >= _EXPANDING * read


@inline
def _followed(p, q, i):
    """The operand to follow: the largest, and among equals the one whose group should own the result."""
    begin, end, first = p.start[i], p.start[i + 1], p.first_made[i]
    largest = -1
    for k in range(begin, end):
        if q.home[p.reads[k]] >= 0:
            largest = max(largest, p.size[p.reads[k]])
    state = -1
    for v in range(first + p.num_made[i] - 1, first - 1, -1):
        if p.state[v] >= 0:
            state = p.state[v]
    best, best_rank = -1, -1
    for k in range(begin, end):
        group = q.home[p.reads[k]]
        if group < 0 or p.size[p.reads[k]] != largest:
            continue
        # Optimizer state comes before parameters, and both before gradients, so that each keeps its own choice.
        argument = q.argument[group]
        rank = max(q.leader[group], 0)
        if state >= 0 and group == q.home[state]:
            rank = _OWN
        elif p.updates[i] and argument >= 0 and p.shape[argument] == p.shape[first]:
            rank = _PARAMETER if p.forward[argument] else _STATE
        if rank > best_rank:
            best, best_rank = k - begin, rank
    return best


@kernel
def follow_gradients(facts, backward, gradient):
    """Marks values that the update reads, and values of the same size that the backward pass turns into them."""
    p = facts
    for i in range(len(p.leads) - 1, -1, -1):
        handed = backward[i] and gradient[p.first_made[i] : p.first_made[i] + p.num_made[i]].any()
        for k in range(p.start[i], p.start[i + 1]):
            if p.updates[i] or (handed and p.size[p.reads[k]] == p.size[p.first_made[i]]):
                gradient[p.reads[k]] = True
