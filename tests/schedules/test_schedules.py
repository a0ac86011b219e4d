"""Every schedule: each microbatch once per stage and chunk, nothing before what it needs, no deadlock, memory kept."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ShardingError
from meshwright.schedules import SCHEDULES, find_schedule, in_flight, table

TRAINING = [name for name in SCHEDULES if name != "inference"]


@st.composite
def pipelines(draw, names=tuple(SCHEDULES)):
    name, stages = draw(st.sampled_from(names)), draw(st.integers(1, 6))
    chunks = draw(st.integers(2, 4)) if name == "interleaved" else 1
    microbatches = draw(st.integers(1, 4)) * stages if chunks > 1 else draw(st.integers(1, 14))
    return name, stages, microbatches, chunks


def run(rows, seconds):
    """When each step ends, each stage doing its row in order; a deadlock is an error."""
    done, place, free = {}, [0] * len(rows), [0.0] * len(rows)
    last = max(step.chunk for row in rows for step in row) * len(rows) + len(rows) - 1
    while any(place[s] < len(row) for s, row in enumerate(rows)):
        before = sum(place)
        for s, row in enumerate(rows):
            while place[s] < len(row):
                step = row[place[s]]
                virtual = step.chunk * len(rows) + s
                needs = {
                    "forward": [("forward", virtual - 1)] if virtual else [],
                    "backward": [("forward", virtual)] + ([("backward", virtual + 1)] if virtual < last else []),
                    "weights": [("backward", virtual)],
                }[step.work]
                needs = [(work, v, step.microbatch) for work, v in needs]
                if any(need not in done for need in needs):
                    break
                start = max([free[s], *(done[need] for need in needs)])
                free[s] = done[step.work, virtual, step.microbatch] = start + seconds(step.work, s)
                place[s] += 1
        assert sum(place) > before, "deadlock"
    return done


@given(pipelines())
def test_each_microbatch_goes_once_through_every_chunk(pipeline):
    name, _, microbatches, chunks = pipeline
    works = {"inference": ["forward"], "zb-h1": ["forward", "backward", "weights"]}.get(name, ["forward", "backward"])
    once = Counter((work, i, c) for work in works for i in range(microbatches) for c in range(chunks))
    assert all(Counter((s.work, s.microbatch, s.chunk) for s in row) == once for row in table(*pipeline))


@given(pipelines())
def test_everything_runs_in_order_without_deadlock(pipeline):
    name, stages, microbatches, chunks = pipeline
    done = run(table(*pipeline), lambda work, stage: 1.0)
    assert len(done) == microbatches * stages * chunks * {"inference": 1, "zb-h1": 3}.get(name, 2)


@given(pipelines(TRAINING))
def test_the_table_holds_what_in_flight_says(pipeline):
    last = "weights" if pipeline[0] == "zb-h1" else "backward"
    for row, most in zip(table(*pipeline), in_flight(*pipeline), strict=True):
        held = peak = 0
        for step in row:
            held += (step.work == "forward") - (step.work == last)
            peak = max(peak, held)
        assert peak == most


@settings(max_examples=60)
@given(pipelines(), st.floats(0.5, 2), st.floats(0.5, 2), st.floats(0.2, 0.5))
def test_fill_is_what_each_further_stage_adds(pipeline, forward, backward, share):
    name, stages, microbatches, chunks = pipeline
    if microbatches < SCHEDULES[name].full_from * stages or share * backward > min(forward, (1 - share) * backward):
        return  # the closed form is that of a full pipeline whose weights' gradients fit the gaps
    backward = 0.0 if name == "inference" else backward
    split = {"backward": backward * (1 - share), "weights": backward * share} if name == "zb-h1" else {}
    times = {"forward": forward, "backward": backward} | split
    done = run(table(*pipeline), lambda work, stage: times[work] / chunks)
    schedule = find_schedule(name, stages, microbatches, chunks)
    fill = schedule.fill(forward, backward, backward * share, chunks)
    assert max(done.values()) == pytest.approx(microbatches * (forward + backward) + (stages - 1) * fill)


@settings(max_examples=60)
@given(pipelines(TRAINING), st.integers(0, 2**32 - 1))
def test_unequal_stages_take_no_longer_than_the_formula_says(pipeline, seed):
    name, stages, microbatches, chunks = pipeline
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.5, 1.5, stages)
    forward, inputs, weights = (scale * rng.uniform(0.3, 2) for _ in range(3))
    whole = name != "zb-h1"
    times = {"forward": forward, "backward": inputs + weights * whole, "weights": weights}
    done = run(table(*pipeline), lambda work, stage: times[work][stage] / chunks)
    own, schedule = forward + inputs + weights, SCHEDULES[name]
    fill = own
    if microbatches >= schedule.full_from * stages:
        hidden = np.minimum(np.minimum(weights, forward), inputs)
        fill = np.array([schedule.fill(t, 0.0, w, chunks) for t, w in zip(own, hidden, strict=True)])
    formula = fill.sum() + ((microbatches - 1) * own + own - fill).max()
    assert max(done.values()) <= formula * (1 + 1e-9)


def test_1f1b_holds_less_than_gpipe_and_zero_bubble_waits_less():
    times = {"forward": 1.0, "backward": 1.0, "weights": 1.0}
    zero = max(run(table("zb-h1", 4, 12), lambda work, s: times[work]).values())
    times["backward"] = 2.0
    plain = max(run(table("1f1b", 4, 12), lambda work, s: times[work]).values())
    assert zero < plain
    assert all(a > b for a, b in pairwise(in_flight("1f1b", 4, 12)))
    assert max(in_flight("1f1b", 4, 12)) < min(in_flight("gpipe", 4, 12))


def test_1f1b_in_chunks_is_the_interleaved_schedule():
    assert table("1f1b", 2, 4, 2) == table("interleaved", 2, 4, 2)
    assert table("interleaved", 2, 4) == table("1f1b", 2, 4)


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        (("2f2b", 2, 4), "unknown schedule '2f2b': choose one of gpipe, 1f1b"),
        (("1f1b", 0, 4), "stages must be a whole number of at least 1, not 0"),
        (("gpipe", 2, 4, 2), "no interleaved form"),
        (("1f1b", 4, 6, 2), "groups of 4, one a stage, and 6 is no multiple"),
    ],
)
def test_what_cannot_be_ordered_is_refused(pipeline, words):
    with pytest.raises(ShardingError, match=words):
        table(*pipeline)
