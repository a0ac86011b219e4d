"""One order for the instructions of all stages, and the proof that nobody waits for ever in it.

Transfers by collectives are two-sided: a device runs what is in its queue one after another, and a transfer begins when
both devices have reached it. So all processes take the instructions in one order, that in which they would begin, and
each device's queue is its part of it. `check` does not trust that: it takes the queues as they are, and refuses a cycle
of waiting, which it names. It runs when a pipeline is planned, and before one runs.
"""

from collections.abc import Hashable, Mapping, Sequence
from heapq import heappop, heappush

from meshwright.errors import ShardingError
from meshwright.schedules.base import BACKWARD, FORWARD, WEIGHTS
from meshwright.schedules.instructions import EXCHANGE, RECEIVE, RUN, SEND, UPDATE, Instruction, message

_SECONDS = {FORWARD: 1.0, BACKWARD: 2.0, WEIGHTS: 1.0}  # relative, to order the instructions of all stages
Lists = Sequence[Sequence[Instruction]]
Entry = tuple[Instruction, Hashable]  # what is done; and what both ends of a transfer have in common, or None


def proven_order(lists: Lists) -> list[tuple[int, Instruction]]:
    """The order in which all processes carry out the instructions, in which no device waits for ever.

    Raises:
        ShardingError: Devices would; the message names which for what.
    """
    order = in_order(lists)
    check(queues(order, len(lists)))
    return order


def in_order(lists: Lists) -> list[tuple[int, Instruction]]:
    """All instructions in an order in which one process can carry them out: the order in which they would begin.

    Every message is sent before it is received, and all stages reach a round of the update before any exchanges it.

    Raises:
        ShardingError: Stages wait for each other for ever; the message names who for what.
    """
    place, clock = [0] * len(lists), [0.0] * len(lists)
    sent: dict[tuple, float] = {}
    waiting: dict[Hashable, list[int]] = {}  # stages by the message, or the round of the update, that they wait for
    updated: dict[int, int] = {}
    order: list[tuple[int, Instruction]] = []
    ready = [(0.0, stage) for stage, own in enumerate(lists) if own]  # stages with the times of their next instructions
    while ready:
        start, stage = heappop(ready)
        one = lists[stage][place[stage]]
        if one.do == RECEIVE and (key := message(one, stage)) not in sent:
            waiting.setdefault(key, []).append(stage)
            continue
        if one.do == EXCHANGE and updated.get(one.round, 0) < len(lists):
            waiting.setdefault(one.round, []).append(stage)
            continue
        late = sent[message(one, stage)] if one.do == RECEIVE else max(clock) if one.do == EXCHANGE else 0.0
        if late > start:
            heappush(ready, (late, stage))
            continue
        place[stage] += 1
        clock[stage] = start + (_SECONDS[one.work] if one.do == RUN else 0.0)
        order.append((stage, one))
        if place[stage] < len(lists[stage]):
            heappush(ready, (clock[stage], stage))
        arrived: Hashable = None
        if one.do == SEND:
            arrived = message(one, stage)
            sent[arrived] = clock[stage]
        elif one.do == UPDATE:
            updated[one.round] = updated.get(one.round, 0) + 1
            arrived = one.round if updated[one.round] == len(lists) else None
        for other in waiting.pop(arrived, ()):
            heappush(ready, (max(clock[other], clock[stage]), other))
    if len(order) < sum(map(len, lists)):
        check([[_entry(one, stage) for one in own] for stage, own in enumerate(lists)])
        raise AssertionError("instructions that wait for each other, and no cycle")
    return order


def queues(order: Sequence[tuple[int, Instruction]], num_stages: int) -> list[list[Entry]]:
    """What the devices of each stage do in turn: a transfer is where it is sent, in the queues of both ends."""
    found: list[list[Entry]] = [[] for _ in range(num_stages)]
    for stage, one in order:
        if one.do == SEND:
            found[stage].append(_entry(one, stage))
            found[one.peer].append((one, found[stage][-1][1]))
        elif one.do != RECEIVE:
            found[stage].append(_entry(one, stage))
    return found


def check(found: Sequence[Sequence[Entry]]) -> None:
    """Refuses queues in which devices wait for each other for ever.

    Args:
        found: Of each device what it does, one after another; a transfer is in two queues.

    Raises:
        ShardingError: The queues have a cycle, or an end of a transfer is missing; the message names it.
    """
    waiting: dict[Hashable, int] = {}  # transfers that one device has reached
    ends: dict[Hashable, list[int]] = {}
    for number, queue in enumerate(found):
        for _, key in queue:
            if key is not None:
                ends.setdefault(key, []).append(number)
    for key, both in ends.items():
        if len(both) != 2:
            one = next(one for one, other in found[both[0]] if other == key)
            raise ShardingError(f'stage {both[0]} waits for ever at "{one}": it is in {len(both)} queues, not in two')
    place = [0] * len(found)
    moving = list(range(len(found)))
    while moving:
        number = moving.pop()
        queue = found[number]
        while place[number] < len(queue):
            key = queue[place[number]][1]
            if key is not None and key not in waiting:
                waiting[key] = number
                break
            if key is not None:
                other = waiting[key]
                if other == number:
                    break  # the other end has not come to it
                place[other] += 1
                moving.append(other)
            place[number] += 1
    stuck = {number: queue[place[number]] for number, queue in enumerate(found) if place[number] < len(queue)}
    if stuck:
        raise ShardingError(f"the stages of this schedule wait for each other for ever: {_cycle(stuck, ends)}")


def _cycle(stuck: Mapping[int, Entry], ends: Mapping[Hashable, list[int]]) -> str:
    """Who waits for whom, in words: each device that is stuck waits for one other, so that there is a cycle."""
    seen: list[int] = []
    number = next(iter(stuck))
    while number in stuck and number not in seen:
        seen.append(number)
        number = next((end for end in ends[stuck[number][1]] if end != number), number)
    links = seen[seen.index(number) :] if number in seen else seen
    return "; ".join(f'stage {one} is at "{stuck[one][0]}"' for one in links)


def _entry(one: Instruction, stage: int) -> Entry:
    return one, message(one, stage) if one.do in (SEND, RECEIVE) else None
