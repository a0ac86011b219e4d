"""The engine on pipelines whose times are known in closed form, and on properties that hold for all."""

import itertools

import pytest

from meshwright.schedules import in_flight
from meshwright.simulator.engine import simulate_work
from meshwright.simulator.work import COLLECTIVE, COMPUTE, GRADIENTS, Chunk, Task
from tests.simulator.works import compute, pipeline


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 7), (2, 2), (4, 4), (4, 9), (8, 32)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_wait_for_all_the_others_once(schedule, stages, microbatches):
    found = simulate_work(pipeline(stages, microbatches, schedule))
    assert found.step_s == pytest.approx((microbatches + stages - 1) * 3.0)
    assert found.bubble_fraction == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize(("stages", "microbatches", "interleave"), [(2, 4, 2), (4, 8, 2), (4, 12, 3)])
def test_interleaved_stages_wait_for_a_part_of_it(stages, microbatches, interleave):
    found = simulate_work(pipeline(stages, microbatches, "interleaved", interleave))
    assert found.step_s == pytest.approx((microbatches + (stages - 1) / interleave) * 3.0)


def test_zero_bubble_waits_less_than_1f1b_and_does_the_same_work():
    plain, zero = (simulate_work(pipeline(4, 16, name)) for name in ("1f1b", "zb-h1"))
    assert zero.step_s < plain.step_s
    assert zero.timeline[0].seconds("compute") == pytest.approx(plain.timeline[0].seconds("compute"))


def test_inference_goes_forward_only():
    found = simulate_work(pipeline(4, 8, "inference"))
    assert found.step_s == pytest.approx(8 + 3)
    assert found.peak_bytes == 101.0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("microbatches", [4, 12])
def test_the_most_memory_is_what_is_in_flight(schedule, microbatches):
    interleave = 2 if schedule == "interleaved" else 1
    found = simulate_work(pipeline(4, microbatches, schedule, interleave))
    held = in_flight(schedule, 4, microbatches, interleave)
    for series, most in zip(found.memory, held, strict=True):
        assert max(size for _, size in series) <= 100 + 8 * most + 1
        assert series[-1][1] == pytest.approx(100.0)
    assert max(size for _, size in found.memory[0]) == 100 + 8 * held[0] + 1


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("send_s", [0.0, 0.4])
def test_no_pass_begins_before_its_input_has_arrived_nor_beside_another(schedule, send_s):
    interleave = 2 if schedule == "interleaved" else 1
    found = simulate_work(pipeline(3, 6, schedule, interleave, send_s=send_s))
    ends = {}
    for stage, run in enumerate(found.stages):
        for one, other in itertools.pairwise(run.passes):
            assert one.end_s <= other.start_s + 1e-9
        for p in run.passes:
            ends[p.step.work, p.step.microbatch, p.step.chunk * 3 + stage] = p.end_s
    for stage, run in enumerate(found.stages):
        for p in run.passes:
            virtual = p.step.chunk * 3 + stage
            before = virtual + {"forward": -1, "backward": 1, "weights": 0}[p.step.work]
            kind = "backward" if p.step.work == "weights" else p.step.work
            if (kind, p.step.microbatch, before) in ends:
                sent = 0.0 if p.step.work == "weights" else send_s
                assert p.start_s >= ends[kind, p.step.microbatch, before] + sent - 1e-9


def test_sending_takes_its_time():
    quick, slow = (simulate_work(pipeline(4, 8, "1f1b", send_s=s)).step_s for s in (0.0, 0.5))
    assert slow >= quick + 2 * 3 * 0.5


def test_gradients_are_exchanged_beside_the_last_backward_pass():
    sync = Task("gradients", COLLECTIVE, GRADIENTS, 1.5, "across")
    closing = (*compute(2.0), sync)
    chunk = Chunk(forward=compute(1.0), backward=compute(2.0), closing=closing)
    work = pipeline(1, 3, "1f1b", chunks=(chunk,))
    assert simulate_work(work).step_s == pytest.approx(9.0)
    late = Chunk(forward=compute(1.0), backward=compute(2.0), closing=(*compute(2.0), sync._replace(seconds=5.0)))
    assert simulate_work(pipeline(1, 3, "1f1b", chunks=(late,))).step_s == pytest.approx(7.0 + 5.0)


def test_other_collectives_stand_in_the_way_to_the_end():
    closing = (*compute(2.0), Task("sum", COLLECTIVE, "tensor", 0.5, "inside", (0,)))
    chunk = Chunk(forward=compute(1.0), backward=compute(2.0), closing=closing)
    assert simulate_work(pipeline(1, 1, "1f1b", chunks=(chunk,))).step_s == pytest.approx(3.5)
    first = simulate_work(pipeline(2, 1, "1f1b", chunks=(chunk, chunk))).stages[0].passes[-1]
    assert first.start_s == pytest.approx(1.0 + 1.0 + 2.5)


def test_the_slowest_stage_sets_the_pace():
    work = pipeline(4, 64, "1f1b")
    slow = work.chunks[1].__class__(forward=compute(2.0), backward=compute(4.0), closing=compute(4.0))
    found = simulate_work(pipeline(4, 64, "1f1b", chunks=(work.chunks[0], slow, *work.chunks[2:])))
    assert 64 * 6 <= found.step_s <= 64 * 6 + 3 * 3 + 1e-6


def test_updates_begin_together():
    update = (Task("optimizer", COMPUTE, "compute", 0.5),)
    found = simulate_work(pipeline(2, 4, "1f1b", update=(update, update), fixed_s=0.25))
    assert len({run.update_s for run in found.stages}) == 1
    assert found.step_s == pytest.approx(5 * 3 + 0.5 + 0.25)


def test_devices_that_do_the_same_cost_nothing_more():
    small, large = (pipeline(4, 8, "1f1b", devices=(size,) * 4) for size in (1, 2500))
    assert simulate_work(small).step_s == simulate_work(large).step_s
    assert large.num_devices == 10_000
