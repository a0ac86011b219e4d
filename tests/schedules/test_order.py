"""The order of all processes' transfers: nobody waits for ever in it, and queues in which somebody does are refused."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.errors import ShardingError
from meshwright.pipeline import planner
from meshwright.schedules import table
from meshwright.schedules.instructions import RUN, SEND, Instruction, chain, instruct
from meshwright.schedules.order import check, in_order, proven_order, queues
from tests.runtime.stages.models import build
from tests.schedules.test_schedules import pipelines


def completes(found):
    """Whether all queues run empty, where both ends of a transfer must be at it: tried pair by pair."""
    place = [0] * len(found)
    while True:
        heads = [queue[i] if i < len(queue) else None for queue, i in zip(found, place, strict=True)]
        moved = [n for n, head in enumerate(heads) if head is not None and head[1] is None]
        keys = [None if head is None else head[1] for head in heads]
        moved += [n for n, key in enumerate(keys) if key is not None and keys.count(key) == 2]
        if not moved:
            return all(head is None for head in heads)
        for n in set(moved):
            place[n] += 1


def is_refused(found):
    try:
        check(found)
    except ShardingError as error:
        assert "wait for each other for ever: stage " in str(error)
        return True
    return False


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.booleans())
def test_every_schedule_has_an_order_in_which_nobody_waits_for_ever(pipeline, is_shared):
    name, stages, _, chunks = pipeline
    trains = name != "inference"
    shares = [(0, s) for s in range(1, stages)] if is_shared else []
    lists = instruct(table(*pipeline), chain(stages * chunks, trains), shares, num_rounds=2 * trains)
    order = proven_order(lists)
    assert sorted(map(str, order)) == sorted(str((s, one)) for s, own in enumerate(lists) for one in own)
    assert completes(queues(order, stages))


@settings(max_examples=80, deadline=None)
@given(pipelines(), st.integers(0, 2**32 - 1))
def test_rows_in_any_order_are_carried_out_or_refused(pipeline, seed):
    """Passes of a stage change places: some such schedules wait for ever, and those alone are refused."""
    rng = np.random.default_rng(seed)
    rows = [list(row) for row in table(*pipeline)]
    for row in rows:
        for _ in range(int(rng.integers(0, 3))):
            a, b = rng.integers(0, len(row), 2)
            row[a], row[b] = row[b], row[a]
    name, stages, _, chunks = pipeline
    lists = instruct(rows, chain(stages * chunks, name != "inference"), num_rounds=0)
    try:
        assert completes(queues(proven_order(lists), stages))
    except ShardingError:
        sent, place, moved = set(), [0] * stages, True
        while moved:  # by hand, message by message
            moved = False
            for s, own in enumerate(lists):
                while place[s] < len(own) and (own[place[s]].do != "receive" or _key(own[place[s]]) in sent):
                    sent |= {_key(own[place[s]])} if own[place[s]].do == SEND else set()
                    place[s], moved = place[s] + 1, True
        assert any(i < len(own) for i, own in zip(place, lists, strict=True)), "it could have been carried out"


def _key(one):
    return one.work, one.microbatch, one.chunk, one.target


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_random_placements_are_refused_where_they_deadlock_and_only_there(seed, is_common):
    """Random values on random devices; each device takes them in an order of its own, or all in one."""
    rng = np.random.default_rng(seed)
    num_devices, num_values = int(rng.integers(2, 5)), int(rng.integers(2, 14))
    device = rng.integers(0, num_devices, num_values).tolist()
    edges = [(a, b) for b in range(num_values) for a in range(b) if device[a] != device[b] and rng.random() < 0.3]
    steps = [(v, None, [device[v]]) for v in range(num_values)]
    steps += [(max(a + 0.5, b - 0.5), (a, b), [device[a], device[b]]) for a, b in edges]
    found = []
    shuffled = sorted(steps, key=lambda step: (step[0], str(step[1])))
    for n in range(num_devices):
        own = shuffled if is_common else sorted(steps, key=lambda step: step[0] + 3 * rng.random())
        found.append([(Instruction(SEND if step[1] else RUN, "forward"), step[1]) for step in own if n in step[2]])
    assert is_refused(found) == (not completes(found))
    assert not (is_common and is_refused(found))


def test_a_cycle_is_named_and_so_is_an_end_that_is_missing():
    sends = [Instruction(SEND, "forward", i, 0, 1, ("forward", 1)) for i in range(2)]
    first, second = [(one, one.microbatch) for one in sends], [(one, one.microbatch) for one in sends[::-1]]
    with pytest.raises(
        ShardingError, match=r'stage 0 is at "send forward 0 .* stage 1"; stage 1 is at "send forward 1'
    ):
        check([first, second])
    with pytest.raises(ShardingError, match="in 1 queues, not in two"):
        check([first, second[:1]])


def test_it_runs_when_a_pipeline_is_planned(monkeypatch):
    def refuse(lists):
        assert len(lists) == 2 and in_order(lists)
        raise ShardingError("a cycle")

    monkeypatch.setattr(planner, "proven_order", refuse)
    init, step, batch = build()
    types = jax.eval_shape(init, jax.random.key(0))
    with pytest.raises(ShardingError, match="a cycle"):
        mw.plan(step, types, batch, cluster="1x2 cpu", method=mw.ThreeD(pipeline=2, microbatch=8))
