"""The scheduler: batches, chunks, preemption and lookahead, under anything that clients may do."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ServingError
from meshwright.serving.requests import Overloaded
from meshwright.serving.scheduling import Limits, Request, Scheduler, Status

ROOMY = Limits(slots=4, block_size=4, blocks=64, chunk=8, token_budget=16, queue=8, max_len=64)


def limits(**changes):
    return Limits(**({name: getattr(ROOMY, name) for name in Limits.__annotations__} | changes))


def counts(plan):
    return {piece.request.id: piece.count for piece in plan.slices}


def run(scheduler, most=1000):
    """Runs steps until nothing is left, and returns how many there were."""
    for step in range(most):
        plan = scheduler.schedule()
        if not plan.slices:
            return step
        scheduler.commit(plan, [7] * sum(piece.samples for piece in plan.slices))
    raise AssertionError("the requests do not end")


def test_prompts_are_cut_into_chunks_beside_sequences_that_generate():
    scheduler = Scheduler(ROOMY)
    scheduler.add(Request("a", [1, 2, 3], max_tokens=9))
    scheduler.add(Request("b", list(range(20)), max_tokens=2))
    first = scheduler.schedule()
    assert counts(first) == {"a": 3, "b": 5}
    assert [piece.samples for piece in first.slices] == [True, False]
    scheduler.commit(first, [50])
    second = scheduler.schedule()
    assert counts(second) == {"a": 1, "b": 8}
    assert [piece.start for piece in second.slices] == [3, 5]
    assert second.num_tokens == 9
    scheduler.commit(second, [51])
    assert run(scheduler) > 0
    assert scheduler.pool.used == scheduler.running == scheduler.waiting == 0


def test_one_step_may_be_planned_before_the_last_one_is_known():
    scheduler = Scheduler(ROOMY)
    request = Request(1, [1, 2, 3], max_tokens=3)
    scheduler.add(request)
    first, second, third, fourth = (scheduler.schedule() for _ in range(4))
    assert [plan.slices[0].follows for plan in (first, second, third)] == [False, True, True]
    assert not fourth.slices  # all three tokens are on their way
    assert scheduler.commit(first, [10]) == []
    assert request.generated == [10] and request.tokens(1, 3) == [2, 3, 10]
    assert scheduler.commit(second, [11], {1: "stop"}) == [request]
    assert request.finish_reason == "stop" and scheduler.pool.used == 0
    assert scheduler.commit(third, [12]) == []
    assert request.generated == [10, 11]


def test_a_cancelled_request_frees_its_blocks_at_once():
    scheduler = Scheduler(ROOMY)
    for number in range(6):
        scheduler.add(Request(number, [number] * 9, max_tokens=5))
    plan = scheduler.schedule()
    for number in range(6):
        scheduler.cancel(number)
    scheduler.cancel("nobody")
    assert scheduler.pool.used == scheduler.running == scheduler.waiting == 0
    assert scheduler.commit(plan) == []
    assert {piece.request.status for piece in plan.slices} == {Status.CANCELLED}


def test_the_request_that_came_last_gives_up_its_blocks():
    scheduler = Scheduler(limits(blocks=6, max_len=20))
    requests = [Request(number, [number] * 7, max_tokens=12) for number in range(2)]
    for request in requests:
        scheduler.add(request)
    run(scheduler)
    assert [request.preemptions for request in requests] == [0, 1]
    assert [len(request.generated) for request in requests] == [12, 12]
    assert scheduler.pool.used == 0


def test_the_blocks_of_the_same_beginning_are_shared():
    scheduler = Scheduler(ROOMY)
    prompt = list(range(16))
    scheduler.add(Request("a", prompt, max_tokens=2))
    run(scheduler)
    for name, other in (("same", prompt), ("longer", [*prompt, 9]), ("other", [*prompt[:9], 90, 91])):
        request = Request(name, other, max_tokens=20)
        scheduler.add(request)
        scheduler.schedule()
        assert request.cached_tokens == {"same": 12, "longer": 16, "other": 8}[name]
    assert scheduler.cached_tokens == 36 and scheduler.prompt_tokens == 60


def test_what_was_generated_is_shared_with_the_next_turn_of_a_conversation():
    scheduler = Scheduler(ROOMY)
    first = Request(1, [1, 2, 3], max_tokens=6)
    scheduler.add(first)
    run(scheduler)
    second = Request(2, [1, 2, 3, *first.generated, 4, 5], max_tokens=1)
    scheduler.add(second)
    scheduler.schedule()
    assert second.cached_tokens == 8


def test_simulated_requests_need_no_tokens():
    scheduler = Scheduler(limits(blocks=9))
    for number in range(8):
        scheduler.add(Request(number, 13, max_tokens=11))
    run(scheduler)
    assert scheduler.pool.used == 0 and scheduler.cached_tokens == 0


def test_contiguous_slots_are_one_block_each():
    scheduler = Scheduler(limits(block_size=64, blocks=4))
    requests = [Request(number, [number] * 20, max_tokens=40) for number in range(8)]
    for request in requests:
        scheduler.add(request)
    run(scheduler)
    assert scheduler.preemptions == 0
    assert all(request.finish_reason == "length" for request in requests)


def test_what_cannot_be_served_is_refused():
    scheduler = Scheduler(limits(queue=1))
    with pytest.raises(ServingError, match="has 60 tokens and max_tokens is 5, together 65; at most 64 can be served"):
        scheduler.add(Request(1, [0] * 60, max_tokens=5))
    scheduler.add(Request(1, [0], max_tokens=5))
    with pytest.raises(ServingError, match="request 1 is being served already"):
        scheduler.add(Request(1, [0], max_tokens=5))
    with pytest.raises(Overloaded, match="1 requests wait, as many as the queue holds"):
        scheduler.add(Request(2, [0], max_tokens=5))
    with pytest.raises(ServingError, match="max_tokens is 0; give at least 1"):
        Request(1, [0], max_tokens=0)
    with pytest.raises(ServingError, match="token_budget is 3, less than one token for each of 4 slots"):
        limits(token_budget=3)
    with pytest.raises(ServingError, match="blocks is 0; give at least 1"):
        limits(blocks=0)


class Device:
    """Carries out plans on a cache of tokens, in order, and checks what each slice reads and writes."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.cache = {}
        self.last = {}  # what each slot's last step took
        self.taken = 0

    def execute(self, plan):
        """The token that each sampling slice takes: it depends on the tokens that the cache holds for it."""
        size, pool, tokens = self.scheduler.limits.block_size, self.scheduler.pool, []
        assert len({piece.slot for piece in plan.slices}) == len(plan.slices)
        for piece in plan.slices:
            known = piece.count - piece.follows
            values = piece.request.tokens(piece.start, known) + [self.last.get(piece.slot)] * piece.follows
            for position, value in enumerate(values, piece.start):
                block = piece.block_table[position // size]
                assert pool.users(block) == 1 and pool._name_of[block] is None, "a shared block is written"
                self.cache[block, position % size] = value
        for piece in plan.slices:
            if piece.samples:
                end = piece.start + piece.count
                token = (
                    sum(
                        (position + 3) * self.cache[piece.block_table[position // size], position % size]
                        for position in range(end)
                    )
                    % 5
                )
                self.last[piece.slot] = token
                tokens.append(token)
        return tokens


def expected(prompt, count):
    """What `Device` generates for a request that is alone."""
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(sum((position + 3) * value for position, value in enumerate(sequence)) % 5)
    return sequence[len(prompt) :]


def check(scheduler, requests):
    """Every block that is used is in the tables of as many requests as it has users."""
    users = {}
    for request in requests:
        for block in request.block_table:
            users[block] = users.get(block, 0) + 1
    pool = scheduler.pool
    assert users == {block: pool.users(block) for block in range(pool.blocks) if pool.users(block)}
    assert pool.used == len(users)
    assert scheduler.running <= scheduler.limits.slots


@st.composite
def some_limits(draw):
    size, blocks, slots = draw(st.sampled_from([1, 2, 4, 16])), draw(st.integers(1, 24)), draw(st.integers(1, 6))
    return Limits(
        slots=slots,
        block_size=size,
        blocks=blocks,
        chunk=draw(st.integers(1, 12)),
        token_budget=slots + draw(st.integers(0, 8)),
        queue=draw(st.integers(1, 12)),
        max_len=draw(st.integers(2, 40)),
    )


@settings(max_examples=150, deadline=None)
@given(some_limits(), st.integers(0, 1), st.data())
def test_whatever_clients_do_every_request_ends_with_its_own_tokens_and_no_block_is_lost(bounds, lookahead, data):
    scheduler, requests, flying, ended = Scheduler(bounds), [], deque(), {}
    device = Device(scheduler)

    def commit():
        plan, tokens = flying.popleft()
        sampled = [piece.request for piece in plan.slices if piece.samples]
        stops = {request.id: "stop" for request in sampled if len(request.generated) + 1 == ended.get(request.id)}
        for request in scheduler.commit(plan, tokens, stops):
            assert request.ended

    def step():
        plan = scheduler.schedule()
        assert plan.num_tokens <= bounds.token_budget
        if plan.slices:
            flying.append((plan, device.execute(plan)))
        while len(flying) > (lookahead if plan.slices else 0):
            commit()
        check(scheduler, requests)
        return bool(plan.slices)

    for number in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "add", "step", "cancel"]))
        if action == "add":
            beginning = [1, 2, 0, 1] * 4  # prompts that have much in common
            prompt = beginning[: data.draw(st.integers(1, 16))] + data.draw(st.lists(st.integers(0, 3), max_size=4))
            request = Request(number, prompt, data.draw(st.integers(1, 12)))
            ended[number] = data.draw(st.integers(1, 14))
            try:
                scheduler.add(request)
                requests.append(request)
            except ServingError:
                pass
        elif action == "step":
            step()
        elif requests:
            scheduler.cancel(data.draw(st.sampled_from(requests)).id)
    quiet = 0
    for _ in range(3000):
        quiet = 0 if step() else quiet + 1
        if quiet == 2:
            break
    assert quiet == 2, "some request starves"
    assert scheduler.running == scheduler.waiting == scheduler.pool.used == 0
    for request in requests:
        assert request.ended
        wanted = expected(request.prompt, min(request.max_tokens, ended[request.id]))
        assert request.generated == wanted[: len(request.generated)]
        if request.finish_reason != "cancelled":
            assert request.generated == wanted


def test_ten_thousand_admissions_cancellations_and_preemptions_lose_no_block():
    rng = random.Random(0)
    scheduler = Scheduler(limits(slots=6, blocks=20, chunk=9, token_budget=15, queue=12, max_len=60))
    requests, flying, admitted, cancelled = [], deque(), 0, 0
    while admitted < 10_000:
        if rng.random() < 0.6:
            request = Request(admitted, [rng.randrange(3) for _ in range(rng.randrange(1, 30))], rng.randrange(1, 30))
            try:
                scheduler.add(request)
            except Overloaded:
                pass
            else:
                requests.append(request)
                admitted += 1
        if requests and rng.random() < 0.2:
            request = requests.pop(rng.randrange(len(requests)))
            cancelled += not request.ended
            scheduler.cancel(request.id)
        flying.append(scheduler.schedule())
        if len(flying) > rng.randrange(2):
            plan = flying.popleft()
            scheduler.commit(plan, [rng.randrange(3) for piece in plan.slices if piece.samples])
        if admitted % 100 == 0:
            requests = [request for request in requests if not request.ended]
            check(scheduler, requests)
    while flying:
        plan = flying.popleft()
        scheduler.commit(plan, [0] * sum(piece.samples for piece in plan.slices))
    run(scheduler, 10_000)
    assert scheduler.pool.used == scheduler.running == scheduler.waiting == 0
    assert scheduler.preemptions > 100 and cancelled > 500 and scheduler.cached_tokens > 100
