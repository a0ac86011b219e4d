"""Promises and loads: what they mean, what files they read, and what they refuse."""

import json

import numpy as np
import pytest

import meshwright as mw


def test_a_promise_without_limits_is_always_kept():
    assert mw.Slo().kept_by(ttft_s=1e9, tpot_s=1e9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttft_s": 0}, "ttft_s is 0; give seconds above 0"),
        ({"tpot_s": float("nan")}, "tpot_s is nan"),
        ({"tpot_s": "fast"}, "tpot_s is 'fast'"),
        ({"percentile": 99}, "percentile is 99; give a share between 0 and 1"),
    ],
)
def test_promises_that_say_nothing_are_refused(options, message):
    with pytest.raises(mw.ServingError, match=message):
        mw.Slo(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "traffic needs rate="),
        ({"rate": -1}, "rate is -1"),
        ({"rate": 1, "tokens_in": 0}, "tokens_in is 0; give a number of tokens"),
        ({"rate": 1, "tokens_out": (9, 3)}, r"tokens_out is \(9, 3\)"),
        ({"rate": 1, "tokens_out": {}}, "tokens_out is {}"),
        ({"rate": 1, "tokens_in": 3.5}, "tokens_in is 3.5"),
        ({"rate": 1, "burstiness": -1}, "burstiness is -1"),
        ({"trace": "nowhere.csv"}, "trace 'nowhere.csv' cannot be read"),
        ({"trace": 5}, "trace is 5; give a file's path"),
        ({"rate": 1, "seed": -1}, "seed is -1; give a whole number from 0"),
        ({"rate": 1, "seed": "x"}, "seed is 'x'; give a whole number from 0"),
    ],
)
def test_loads_that_say_nothing_are_refused(options, message):
    with pytest.raises(mw.ServingError, match=message):
        mw.Traffic(**options)


@pytest.mark.parametrize("burstiness", [0, 0.5, 1, 3])
def test_arrivals_have_the_rate_and_the_burstiness_that_was_asked_for(burstiness):
    requests = mw.Traffic(rate=5, tokens_in=(10, 30), tokens_out={5: 1, 9: 3}, burstiness=burstiness).arrivals(20_000)
    gaps = np.diff([r.at_s for r in requests])
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.1, abs=1e-9)
    assert np.mean([r.tokens_in for r in requests]) == pytest.approx(20, rel=0.02)
    assert np.mean([r.tokens_out for r in requests]) == pytest.approx(8, rel=0.02)


def test_another_rate_has_the_same_requests_closer_together():
    slow = mw.Traffic(rate=1, tokens_in=(1, 99), tokens_out=(1, 99))
    fast = slow.at(4)
    pairs = zip(slow.arrivals(50), fast.arrivals(50), strict=True)
    assert all(a[1:] == b[1:] and a.at_s == pytest.approx(4 * b.at_s) for a, b in pairs)


def test_a_trace_is_read_as_csv_as_json_and_as_others_publish_it(tmp_path):
    rows = [(10.0, 100, 7), (10.5, 200, 8), (12.0, 300, 9)]
    files = {
        "ours.csv": "arrival_s,tokens_in,tokens_out\n" + "\n".join(f"{a},{b},{c}" for a, b, c in rows),
        "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "\n".join(f"2023-11-16 18:15:{a:010.7f},{b},{c}" for a, b, c in rows),
        "office.csv": "\ufeffarrival_s, tokens_in, tokens_out\r\n" + "\r\n".join(f"{a}, {b}, {c}" for a, b, c in rows),
        "mooncake.jsonl": "\n".join(
            json.dumps({"timestamp": int(a * 1e3), "input_length": b, "output_length": c, "hash_ids": [1]})
            for a, b, c in rows
        ),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        load = mw.Traffic(trace=tmp_path / name)
        assert [tuple(r) for r in load.arrivals(3)] == [(0.0, 100, 7), (0.5, 200, 8), (2.0, 300, 9)]
        assert [tuple(r) for r in load.arrivals(5)[3:]] == [(3.0, 100, 7), (3.5, 200, 8)]  # it begins again
        assert (load.mean_rate, load.mean_in, load.mean_out, load.longest) == (1.0, 200, 8, 309)
        assert [r.at_s for r in load.at(2).arrivals(3)] == [0, 0.25, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival_s,tokens_in,tokens_out\n1,5,5\n", "at least two requests"),
        ("arrival_s,tokens_in\n1,5\n2,5\n", "request 1: it has no tokens_out"),
        ("arrival_s,tokens_in,tokens_out\n1,5,5\n2,0,5\n", "request 2: lengths are 0 and 5"),
        ("arrival_s,tokens_in,tokens_out\n1,5,5\nsoon,2,5\n", "request 2: Invalid isoformat"),
        ('{"arrival_s": 1}\n', "request 1: it has no tokens_in"),
        ('{"arrival_s": 1, "tokens_in": 1.5, "tokens_out": 1}\n', "request 1: lengths are 1.5 and 1"),
        ('{"arrival_s": 1,\n', "request 1: "),
    ],
)
def test_damaged_traces_are_refused_with_the_line(tmp_path, text, message):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(mw.ServingError, match=message):
        mw.Traffic(trace=path)
