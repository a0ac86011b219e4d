"""Slots that hold prefixes: what a request finds in its slot is what it would have computed there."""

import random

from meshwright.serving.scheduling import Limits, Request, Scheduler
from meshwright.serving.scheduling.slots import Place, SlotPool


def test_a_free_slot_is_taken_over_and_a_busy_one_is_copied():
    pool = SlotPool((1, 4))
    names = [b"a", b"b", b"c"]
    assert pool.take(names) == Place(0, 0, None)
    pool.name(0, names)
    assert pool.take(names[:2]) == Place(1, 2, 0)  # the first is busy
    pool.free(0)
    assert pool.take([b"a", b"x"]) == Place(0, 1, None)  # in place, and the rest of it is forgotten
    assert pool.take(names) == Place(2, 2, 1)


def test_low_rungs_first_and_in_them_what_was_used_least_recently():
    pool = SlotPool((1, 4))
    assert [pool.take(()).slot for _ in range(4)] == [0, 1, 2, 3]
    assert not pool.available
    pool.name(2, [b"a"])
    for slot in (2, 3, 1, 0):
        pool.free(slot)
    assert [pool.take(()).slot for _ in range(4)] == [0, 1, 3, 2]  # what holds nothing goes before what does


def test_what_lies_in_a_slot_is_what_its_request_would_have_computed():
    """Random requests with few tokens, so that many begin alike, on a device of lists."""
    draw, reuse = random.Random(3), 4
    scheduler = Scheduler(Limits(5, 64, 5, 8, 13, 50, 64, reuse))
    device, flying, copies, sent = [[None] * 64 for _ in range(5)], None, 0, 0
    for _ in range(3000):
        if scheduler.waiting < 8 and sent < 400:
            begin = [draw.randrange(2)] * draw.randrange(1, 24)
            scheduler.add(Request(sent, begin + [draw.randrange(2) for _ in range(4)], draw.randrange(1, 12)))
            sent += 1
        if draw.random() < 0.05:
            scheduler.cancel(draw.randrange(sent))
        plan = scheduler.schedule()
        for source, target in plan.copies:
            device[target] = list(device[source])
            copies += 1
        for piece in plan.slices:
            known = piece.request.prompt + piece.request.generated
            before = min(piece.start, len(known))
            assert device[piece.slot][:before] == known[:before]
            for at in range(piece.start, piece.start + piece.count):
                device[piece.slot][at] = 0 if at >= len(known) else known[at]
        if flying is not None:
            scheduler.commit(flying, [0] * sum(piece.samples for piece in flying.slices))
        flying = plan
    assert sent == 400 and not scheduler.running and not scheduler.waiting
    assert copies > 20 and scheduler.cached_tokens > 1000
