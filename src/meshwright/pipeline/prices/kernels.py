"""The hot loops of the inter-operator search: pricing every range of layers, and the dynamic programme over them."""

import numpy as np

from meshwright.jit import kernel

# Rows of the sums that `price_ranges` takes for each option, from the first layer up to each.
MICROBATCH, WEIGHTS, ONCE, GRADIENTS, STATE, ACTIVATIONS = range(6)


@kernel(interpretable=False, nan=True)
def _collective(ways, num_bytes):
    """The least of several ways, each a fixed time and a time per byte."""
    best = np.inf
    for way in range(len(ways)):
        best = min(best, ways[way, 0] + ways[way, 1] * num_bytes)
    return best if num_bytes > 0 else 0.0


@kernel(interpretable=False, nan=True)
def _shared(ties, tie_s, tie_bytes, first, last):
    """A range's cost of parameters shared with layers outside it: seconds, and bytes of those that it does not own."""
    seconds, size = 0.0, 0.0
    for tie in range(len(ties)):
        owns, copies = first <= ties[tie, 0] < last, first <= ties[tie, 1] < last
        if owns != copies:
            seconds += tie_s[tie]
            size += tie_bytes[tie] if copies else 0.0
    return seconds, size


@kernel(interpretable=False, nan=True)
def price_ranges(
    sums, transient, ways, ties, tie_bytes, tie_s, transfer, limit, num_microbatches, hides, floor, best_s, fill, busy,
    which,
):  # fmt: skip
    """For each number of microbatches in flight and each range of layers, the options that fit and can be best.

    The time of a step is Σ fill + max busy, so an option that has less of both than another is at least as good in
    every pipeline: only the options on the Pareto front are kept.

    Args:
        sums: For each option the rows named above, summed up to each layer.
        transient: For each option and layer, bytes needed while it runs.
        ways: For each option the algorithms of up to two collectives that sum a range's gradients.
        ties: Pairs of layers that share a parameter, its owner first.
        tie_bytes, tie_s: For each option and pair, bytes of a copy of it with its gradient, and seconds to exchange it.
        transfer: For each option, seconds, there and back, over the cut before each layer and after the last.
        limit: Bytes of a device.
        num_microbatches: How many.
        hides: How often a stage's weights' gradients fill a gap of the pipeline: twice in a zero-bubble schedule.
        floor: The least fill of the layers up to each, under any option.
        best_s: The time of the incumbent; options that cannot be part of a quicker step are left out.
        fill, busy, which: Outputs, by rank: the time that a stage adds to the fill of the pipeline, its own time beyond
            that, and the option. The first rank has the least time of its own.

    Returns:
        The number of ranks; if it exceeds the allocated number, the tables are not complete.
    """
    num_options, num_layers = transient.shape
    ranks, most, peak = 0, fill.shape[1], np.zeros(num_options)
    adds, own, held = np.empty(num_options), np.empty(num_options), np.empty(num_options, np.int64)
    named, front = np.empty(num_options, np.int64), np.empty(num_options, np.int64)
    for first in range(num_layers):
        peak[:] = 0.0
        for last in range(first + 1, num_layers + 1):
            least = best_s - (floor[num_layers] - floor[last] + floor[first])
            count = 0
            for option in range(num_options):
                peak[option] = max(peak[option], transient[option, last - 1])
                work = sums[option]
                microbatch = work[MICROBATCH, last] - work[MICROBATCH, first]
                sent = transfer[option, last]
                time = microbatch + sent + (num_microbatches - 1) * max(microbatch, sent)
                time += work[ONCE, last] - work[ONCE, first]
                if time >= least:
                    continue
                activations = work[ACTIVATIONS, last] - work[ACTIVATIONS, first]
                shared_s, shared_bytes = _shared(ties, tie_s[option], tie_bytes[option], first, last)
                free = limit - (work[STATE, last] - work[STATE, first]) - shared_bytes - peak[option]
                if free < activations:
                    continue
                gradients = work[GRADIENTS, last] - work[GRADIENTS, first]
                time += shared_s
                for step in range(ways.shape[1]):
                    time += _collective(ways[option, step], gradients)
                if time >= least:
                    continue
                hidden = hides * (work[WEIGHTS, last] - work[WEIGHTS, first])
                adds[count], own[count], named[count] = microbatch - hidden + sent, time, option
                held[count] = most
                if activations > 0:
                    held[count] = int(min(float(most), free / activations))
                count += 1
            if count:
                kept = (adds[:count], own[:count], held[:count], named)
                ranks = max(ranks, _rank(kept, front, fill, busy, which, first, last))
    return ranks


@kernel(interpretable=False, nan=True)
def _rank(options, front, fill, busy, which, first, last):
    """Stores the options that no other one beats in both times, for each number of microbatches in flight.

    Args:
        options: The fill and the busy time of each option, how many microbatches it can hold, its number.
        front: Space for the options that are kept.
        fill, busy, which, first, last: As in `price_ranges`.

    Returns:
        The most that are kept for any number.
    """
    adds, own, held, named = options
    room, most = fill.shape[0], fill.shape[1]
    order, ranks, count, changes = np.argsort(adds), 0, 0, most
    for number in range(most - 1, -1, -1):
        if number < changes:
            count, changes, shortest = 0, 0, np.inf
            for option in order:
                if held[option] > number and own[option] < shortest:
                    shortest, front[count] = own[option], option
                    count += 1
                elif held[option] <= number:
                    changes = max(changes, held[option])
            ranks = max(ranks, count)
        for rank in range(min(count, room)):
            option = front[count - 1 - rank]
            fill[rank, number, first, last] = adds[option]
            busy[rank, number, first, last] = own[option] - adds[option]
            which[rank, number, first, last] = named[option]
    return ranks


@kernel(interpretable=False, nan=True)
def _ends(busy, limit):
    """For each row and first layer, one past the last end at which a range is no busier than a limit; 0 for none."""
    num_rows, num_layers, _ = busy.shape
    found = np.zeros((num_rows, num_layers), np.int64)
    for row in range(num_rows):
        for first in range(num_layers):
            for last in range(num_layers, first, -1):
                if busy[row, first, last] <= limit and busy[row, first, last] < np.inf:
                    found[row, first] = last + 1
                    break
    return found


@kernel(interpretable=False, nan=True)
def _window(busy, kind_of, ends, size, limit, num_devices):
    """For each layer, the least devices that the layers from it on need, and the most that earlier layers leave them.

    Each range takes its smallest submesh on which it is no busier than the limit, whatever its microbatches in flight
    and its placement: a lower bound on the devices that any stages need.

    Args:
        busy: As in `_ends`.
        kind_of: The kind of submesh of each row of ``busy``.
        ends: As of `_ends`.
        size: Devices of each kind.
        limit: See there.
        num_devices: All devices.
    """
    num_rows, num_layers, _ = busy.shape
    least = np.full((num_layers, num_layers + 1), num_devices + 1)
    for row in range(num_rows):
        for first in range(num_layers):
            for last in range(first + 1, ends[row, first]):
                if busy[row, first, last] <= limit:
                    least[first, last] = min(least[first, last], size[kind_of[row]])
    after, before = np.full((2, num_layers + 1), num_devices + 1)
    after[num_layers] = before[0] = 0
    for first in range(num_layers - 1, -1, -1):
        for last in range(first + 1, num_layers + 1):
            after[first] = min(after[first], least[first, last] + after[last])
    for last in range(1, num_layers + 1):
        for first in range(last):
            before[last] = min(before[last], before[first] + least[first, last])
    return after, num_devices - before


@kernel(interpretable=False, nan=True)
def cheapest(fill, busy, size, allowed, limit):
    """F(k, d): the least sum of `fill` over stages that hold the layers from ``k`` on, on the last ``d`` devices.

    Ranges that are also too busy at every later end are skipped, and so are numbers of devices that are too few for the
    layers from ``k`` on, or leave too few for the layers before.

    Args:
        fill, busy: For each kind of submesh, each first layer and end; no stage may be busier than ``limit``.
        size: Devices of each kind of submesh.
        allowed: For each kind of submesh and number of devices left, whether it can come next.
        limit: See there.

    Returns:
        The tables of sums, of the ends of the next stage, and of its kind: by ``d`` and ``k``.
    """
    num_kinds, num_layers, _ = fill.shape
    num_devices = allowed.shape[1] - 1
    best = np.full((num_devices + 1, num_layers + 1), np.inf)
    end, kind = np.full(best.shape, -1), np.full(best.shape, -1)
    best[0, num_layers] = 0.0
    ends = _ends(busy, limit)
    fewest, most = _window(busy, np.arange(num_kinds), ends, size, limit, num_devices)
    for first in range(num_layers - 1, -1, -1):
        for left in range(max(fewest[first], 1), most[first] + 1):
            for z in range(num_kinds):
                if size[z] > left or not allowed[z, left]:
                    continue
                for last in range(first + 1, ends[z, first]):
                    total = fill[z, first, last] + best[left - size[z], last]
                    if total < best[left, first] and busy[z, first, last] <= limit:
                        best[left, first], end[left, first], kind[left, first] = total, last, z
    return best, end, kind


@kernel(interpretable=False, nan=True)
def cheapest_staged(fill, busy, size, allowed, limit, in_flight):
    """F(s, k, d): the same with ``s`` stages, the ``s``-th from the end holding ``in_flight[s - 1]`` microbatches.

    Args:
        fill, busy: As in `cheapest`, with a dim after the kind for the number of microbatches in flight, one less.
        size, allowed, limit: As there.
        in_flight: See there; at most as many stages as it has entries.

    Returns:
        The tables of `cheapest`, by ``s``, ``d`` and ``k``.
    """
    num_kinds, num_held, num_layers, _ = fill.shape
    num_devices, num_stages = allowed.shape[1] - 1, len(in_flight)
    best = np.full((num_stages + 1, num_devices + 1, num_layers + 1), np.inf)
    end, kind = np.full(best.shape, -1), np.full(best.shape, -1)
    best[0, 0, num_layers] = 0.0
    rows = busy.reshape(num_kinds * num_held, num_layers, num_layers + 1)
    ends = _ends(rows, limit)
    kind_of = np.arange(num_kinds * num_held) // num_held
    fewest, most = _window(rows, kind_of, ends, size, limit, num_devices)
    for stage in range(1, num_stages + 1):
        held = in_flight[stage - 1] - 1
        for first in range(num_layers - stage, -1, -1):
            for left in range(max(fewest[first], stage), most[first] + 1):
                for z in range(num_kinds):
                    if size[z] > left or not allowed[z, left]:
                        continue
                    for last in range(first + 1, ends[z * num_held + held, first]):
                        total = fill[z, held, first, last] + best[stage - 1, left - size[z], last]
                        if total < best[stage, left, first] and busy[z, held, first, last] <= limit:
                            best[stage, left, first] = total
                            end[stage, left, first], kind[stage, left, first] = last, z
    return best, end, kind


@kernel(interpretable=False, nan=True)
def least_peak(need, size, allowed, in_flight):
    """For each number of stages, the least need of the fullest stage.

    Args:
        need: For each kind of submesh, microbatches in flight (one less), first layer and end, what a stage needs.
        size, allowed, in_flight: As in `cheapest_staged`.
    """
    num_kinds, _, num_layers, _ = need.shape
    num_devices, num_stages = allowed.shape[1] - 1, len(in_flight)
    best = np.full((num_stages + 1, num_layers + 1, num_devices + 1), np.inf)
    best[0, num_layers, 0] = 0.0
    for stage in range(1, num_stages + 1):
        held = in_flight[stage - 1] - 1
        for first in range(num_layers - stage, -1, -1):
            for left in range(stage, num_devices + 1):
                for z in range(num_kinds):
                    if size[z] > left or not allowed[z, left]:
                        continue
                    for last in range(first + 1, num_layers + 1):
                        most = max(need[z, held, first, last], best[stage - 1, last, left - size[z]])
                        best[stage, first, left] = min(best[stage, first, left], most)
    return best[:, 0, -1]
