"""Rows of published results: odd ones are read or refused by name, and the told ones come out as they must."""

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.validation.replay import RowsError, read_rows, replay, replay_rows
from meshwright.validation.row import Row, RowError, recipe_of
from meshwright.validation.validation import Validation, ordered_pairs

pytestmark = pytest.mark.slow

DATA = Path(os.environ.get("MESHWRIGHT_DATA", Path(__file__).parents[3] / "shared" / "data"))
GPT = {
    "row_id": "one",
    "source": "torchtitan 2025",
    "model": "GPT-1B",
    "hidden": "2048",
    "layers": "4",
    "heads": "16",
    "vocab": "32000",
    "seq": "2048",
    "gpus": "8",
    "gpu_type": "H100",
    "dp": "8",
    "zero_stage": "3",
    "microbatch": "2.0",
    "global_batch": "32",
    "precision": "bf16",
    "recompute": "none",
    "step_time_s": "0.5",
    "trust": "A",
}


def row(**cells):
    return Row({k: v for k, v in (GPT | cells).items() if v is not None})


def test_a_row_becomes_a_recipe():
    found = recipe_of(row())
    assert (found.data, found.zero, found.shard, found.microbatch, found.num_microbatches) == (8, 3, 8, 2, 2)
    assert found.shape.kv_heads == 16
    assert found.shape.ffn == 4 * 2048


@pytest.mark.parametrize(
    "missing", ["dp", "heads", "vocab", "microbatch", "precision", "recompute", "zero_stage", "source"]
)
def test_cells_may_be_missing(missing):
    assert replay(row(**{missing: None})).predicted_step_s > 0


@pytest.mark.parametrize(
    "cells",
    [
        {"model": "Mixtral-8x7B", "ep": "8"},
        {"cp": "4", "dp": "2", "seq": "8192"},
        {"microbatch": "0.5", "cp": "2", "dp": "4", "global_batch": "4"},
        {"tp": "2", "pp": "2", "dp": "2", "interleave_v": "2", "global_batch": "6"},
        {"gpu_type": "TPU v5e-8", "recompute": "full"},
        {"precision": "fp8 rowwise"},
        {"precision": "int8", "gpu_type": "TPU v6e"},
        {"zero_stage": "HSDP", "gpus": "16", "dp": "16"},
        {"gpu_type": "V100-SXM2-16GB", "precision": "fp16", "source": "Alpa OSDI22 megatron"},
        {"step_time_s": None, "tokens_per_s_per_gpu": "~10,000"},
    ],
)
def test_many_kinds_of_rows_are_understood(cells):
    found = replay(row(**cells))
    assert found.predicted_step_s > 0
    assert found.error is not None


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"hidden": None}, "one: hidden is ''"),
        ({"gpus": "many"}, "one: gpus is 'many'"),
        ({"layers": "4.5"}, "one: layers is '4.5'"),
        ({"gpu_type": "abacus"}, "one: gpu_type 'abacus'"),
        ({"precision": "posit"}, "one: precision is 'posit'"),
        ({"tp": "3"}, "does not divide gpus"),
        ({"layers": "4", "pp": "8"}, "one: pp is 8, but there are 4 layers"),
        ({"heads": "9999"}, "one: heads is 9999, but hidden is"),
        ({"ep": "4"}, "how many experts"),
    ],
)
def test_rows_that_cannot_be_understood_name_the_cell(cells, message):
    with pytest.raises(RowError, match=message.replace("(", r"\(")):
        recipe_of(row(**cells))
    (found,) = replay_rows([row(**cells)])
    assert message in found.problem
    assert found.to_json()["predicted_step_s"] is None


def test_strategies_are_ordered_within_one_model_and_machine():
    slow = row(row_id="slow", recompute="full", step_time_s="0.8")
    found = [replay(r) for r in (row(), slow, row(row_id="other", gpus="16", dp="16"))]
    assert list(ordered_pairs(found)) == [True]
    wrong = [replace(f, predicted_step_s=1 / f.predicted_step_s) for f in found[:2]]
    assert list(ordered_pairs(wrong)) == [False]


@pytest.mark.parametrize("name", ["step_time_s", "peak_mem_gib", "tokens_per_s_per_gpu", "global_batch"])
@pytest.mark.parametrize("value", ["soon", "1.2.3", "-1", None])
def test_a_figure_that_cannot_be_read_stops_no_other_row(name, value):
    """Nor does one that is not there, such as the batch by which strategies are compared."""
    both = {name: value} | ({"step_time_s": None} if name.startswith("tokens") else {})
    rows = [row(), row(row_id="two", recompute="full", **both), row(row_id="three")]
    found = Validation(tuple(replay_rows(rows)))
    assert [bool(f.problem) for f in found.rows] == [False, value is not None, False]
    assert len(found.to_json()["rows"]) == 3 and "three" in str(found)
    if value is not None:
        assert f"two: {name} is {value!r}" in found.rows[1].problem


def test_a_summary_without_rows_claims_nothing():
    assert all(target.reached is None for target in Validation(()).targets)


def write(path, rows):
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, sorted({name for r in rows for name in r}))
        table.writeheader()
        table.writerows(rows)
    return path


def test_files_are_read_as_they_come(tmp_path):
    path = write(tmp_path / "rows.csv", [GPT, {"gpus": "8"}])
    rows = read_rows(path)
    assert [r.id for r in rows] == ["one", "row 2"]
    found = Validation(tuple(replay_rows(rows)))
    assert len(found.problems) == 1
    data = json.loads(json.dumps(found.to_json()))
    assert {
        "row_id",
        "trust",
        "predicted_step_s",
        "published_step_s",
        "predicted_peak_gib",
        "published_peak_gib",
    } <= set(data["rows"][0])
    assert "could not be understood" in str(found)


def test_files_that_are_no_tables_are_refused(tmp_path):
    with pytest.raises(RowsError, match="there is no file"):
        read_rows(tmp_path / "nothing.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(RowsError, match="no rows with a column gpus"):
        read_rows(tmp_path / "empty.csv")
    path = write(tmp_path / "narrow.csv", [{name: value for name, value in GPT.items() if name != "hidden"}])
    with pytest.raises(RowsError, match="no rows with a column hidden"):
        read_rows(path)


@pytest.mark.skipif(
    not (DATA / "published.csv").exists(),
    reason=f"no published results in {DATA}: set MESHWRIGHT_DATA to the folder that holds published.csv",
)
def test_the_told_rows_come_out_as_they_must():
    found = Validation(tuple(replay_rows(read_rows(DATA / "published.csv"))))
    assert not found.problems
    missed = [target for target in found.targets if not target.reached]
    assert not missed
    assert all(replay.causes or replay.row.text("notes") for replay in found.worst)
