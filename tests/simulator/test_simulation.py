"""What a simulation says of itself: figures, timeline, trace, plain data."""

import json

import pytest

from meshwright.simulator.engine import simulate_work
from meshwright.simulator.work import COLLECTIVE, Chunk, Task
from tests.simulator.works import compute, pipeline


@pytest.fixture(scope="module")
def found():
    return simulate_work(pipeline(4, 8, "1f1b", send_s=0.1))


def test_rates_follow_from_the_step(found):
    assert found.tokens_per_s == pytest.approx(64 / found.step_s)
    assert found.tflops_per_device == pytest.approx(1.0 / found.step_s / 16)
    assert found.mfu == pytest.approx(found.tflops_per_device)
    assert found.fits


def test_compute_and_idle_fill_the_step(found):
    for line in found.timeline:
        busy = line.seconds("compute") + line.seconds("idle")
        assert busy == pytest.approx(found.step_s)
        assert line.num_devices == 4


def test_every_interval_lies_in_the_step_and_has_a_name(found):
    for line in found.timeline:
        assert [i.start_s for i in line.intervals] == sorted(i.start_s for i in line.intervals)
        for item in line.intervals:
            assert -1e-9 <= item.start_s <= item.end_s <= found.step_s + 1e-9
            assert item.kind in ("compute", "collective", "transfer", "idle")
            assert item.name or item.kind == "idle"


def test_all_but_the_ends_send_both_ways(found):
    sent = [sum(i.kind == "transfer" for i in line.intervals) for line in found.timeline]
    assert sent == [8, 16, 16, 8]


def test_the_trace_is_what_perfetto_reads(found, tmp_path):
    path = tmp_path / "step.perfetto.json"
    found.save_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == sum(len(line.intervals) for line in found.timeline)
    assert all(e["dur"] >= 0 and {"name", "pid", "tid", "ts"} <= e.keys() for e in spans)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {f"stage {i} × 4" for i in range(4)}
    assert any(e["ph"] == "C" for e in events)


def test_plain_data_and_text_agree(found):
    data = json.loads(json.dumps(found.to_json()))
    assert data["step_s"] == found.step_s
    assert data["peak_bytes"] == found.peak_bytes
    text = str(found)
    assert "4 stages" in text
    assert f"bubble {found.bubble_fraction:.1%}" in text
    assert "fits" in text


def test_what_does_not_fit_says_so():
    assert "does not fit" in str(simulate_work(pipeline(2, 4, "1f1b", limit_bytes=(50.0, 50.0))))


def test_many_stages_are_printed_in_part():
    text = str(simulate_work(pipeline(32, 32, "1f1b")))
    assert "stage 0" in text
    assert "stage 31" in text
    assert "…" in text
    assert "stage 15" not in text


def test_what_overlaps_lies_in_rows_of_its_own(tmp_path):
    sends = tuple(Task(f"send {lane}", COLLECTIVE, lane, 1.0, "across") for lane in ("fetch", "reduce"))
    chunk = Chunk(forward=(*compute(1.0), *sends), backward=compute(2.0), closing=compute(2.0))
    found = simulate_work(pipeline(1, 2, "1f1b", chunks=(chunk,)))
    found.save_trace(tmp_path / "trace.json")
    rows = {}
    for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            assert event["ts"] >= rows.get(event["tid"], 0.0) - 1e-6
            rows[event["tid"]] = event["ts"] + event["dur"]
    assert len(rows) == 4  # compute, two of collectives, idle
