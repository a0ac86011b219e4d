"""The record: it prices and holds memory exactly as planning did, whatever it was packed into."""

from dataclasses import replace

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright import zoo
from meshwright.explain.alternatives.forced import Pricing
from meshwright.parallelism.dim_names import connected
from meshwright.parallelism.subject.memory_timeline import memory_over_time
from meshwright.plan_files.packing import pack, unpack
from meshwright.plans.records.record import MEMORY_ROLES, Record
from meshwright.solver import price
from tests.explain.plans import plan_of

pytestmark = pytest.mark.slow

CASES = [
    ("gpt-tiny", (4, 2), mw.Auto(), {}),
    ("gpt-tiny", (4, 2), mw.Zero(3), {}),
    ("llama-tiny", (8,), mw.DataParallel(), {"scan": True}),
    ("moe-tiny", (4, 2), mw.TensorParallel(), {}),
    ("wide-resnet-tiny", (2, 2), mw.Auto(), {}),
]


@pytest.mark.parametrize(("name", "shape", "method", "options"), CASES)
def test_a_record_prices_and_holds_what_the_plan_says(name, shape, method, options):
    plan = plan_of(name, shape, method, **options)
    again = Record.from_data(unpack(pack(plan.record.to_data())))
    problem = again.problem
    assert price(problem.problem({}, None), problem.choice).cost == pytest.approx(plan.cost.total, rel=1e-9)
    profile = problem.memory.profile(problem.choice, problem.copies_made(problem.choice))
    assert profile.peak_bytes == plan.memory.peak_bytes
    over_time = memory_over_time(problem)
    assert over_time.total.max() == pytest.approx(plan.memory.peak_bytes)
    assert over_time.thinned(7).total.max() == over_time.total.max()


def test_a_record_that_does_not_tell_what_is_cut_out_counts_every_copy():
    record = plan_of("moe-tiny", (4, 2), mw.TensorParallel()).record
    data = record.to_data()
    for edge in data["problem"]["edges"]:
        del edge["ahead"], edge["cut"]
    old, choice = Record.from_data(data).problem, record.problem.choice
    assert len(old.copies_made(choice).start) > len(record.problem.copies_made(choice).start)


def test_a_record_of_the_third_version_joins_no_sums():
    record = plan_of("moe-tiny", (4, 2), mw.TensorParallel()).record
    data = record.to_data()
    for edge in data["problem"]["edges"]:
        for name in ("offers", "settling", "takes"):
            del edge[name]
    problem = Record.from_data(data).problem
    saved = sum(
        edge.num * edge.joined[problem.choice[edge.source], problem.choice[edge.reader]]
        for edge in record.problem.edges
        if len(edge.offers)
    )
    assert saved > 0
    assert problem.cost_of(problem.choice) == pytest.approx(record.problem.cost_of(problem.choice) + saved)


@pytest.mark.parametrize("method", [mw.Auto(), mw.DataParallel()])
def test_a_record_keeps_the_best_choice_without_the_limit(method):
    least = plan_of("gpt-tiny", (4, 2), method).memory.peak_bytes
    tight = plan_of("gpt-tiny", (4, 2), method, memory_bytes=int(least * (0.75 if method == mw.Auto() else 1)))
    problem = Record.from_data(unpack(pack(tight.record.to_data()))).problem
    solved = Pricing(replace(tight.record, problem=replace(problem, unlimited=problem.unlimited[:0])), None).free
    kept = Pricing(replace(tight.record, problem=problem), None).free
    assert len(problem.unlimited) == len(problem.choice)
    assert kept.cost == pytest.approx(solved.cost, rel=1e-9)
    profile = problem.memory.profile(problem.unlimited, problem.copies_made(problem.unlimited))
    assert kept.peak_bytes == profile.peak_bytes
    assert (kept.peak_bytes > problem.limit) == (method == mw.Auto())


nested = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(nested, arrays.arrays(np.int64, st.integers(0, 6)), arrays.arrays(np.float64, (2, 3)))
@settings(max_examples=40)
def test_what_is_packed_comes_back(data, whole, real):
    found = unpack(pack({"data": data, "arrays": [whole, real]}))
    assert found["data"] == data
    for one, other in zip(found["arrays"], (whole, real), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("text", ["", "nonsense", "AAAA"])
def test_damaged_text_is_said(text):
    with pytest.raises(ValueError, match="damaged"):
        unpack(text)


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=14))
@settings(max_examples=60)
def test_components_are_those_that_walking_finds(edges):
    one, other = (np.array([e[side] for e in edges], np.int64) for side in (0, 1))
    found = connected(12, one, other)
    near = {i: {i} for i in range(12)}
    for _ in range(12):
        for a, b in edges:
            near[a] |= near[b]
            near[b] |= near[a]
    assert found.tolist() == [min(near[i]) for i in range(12)]


def test_gradients_are_not_called_temporaries():
    """With data parallelism every device has made all gradients, whole, before any parameter is updated."""
    example = zoo.build("gpt-tiny", batch=64)
    plan = mw.plan(example.train_step, example.state, example.batch, cluster="1x8 cpu", method=mw.DataParallel())
    by_role = memory_over_time(plan.record.problem).by_role
    assert by_role[MEMORY_ROLES.index("gradients")].max() >= plan.memory.argument_bytes["parameters"]
