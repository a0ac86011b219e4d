"""The commands that simulate: simulate, validate and explore, and what they refuse."""

import json

import pytest

import meshwright
from meshwright.cli.simulate import changed
from tests.cli.test_app import refuse, run
from tests.simulator.test_published import GPT, write

SMALL = ("mlp", "--batch", "64", "--layers", "2")


def test_simulate_plans_and_prints_cost_search_time_and_step(tmp_path):
    trace, data = tmp_path / "step.json", tmp_path / "figures.json"
    found = run("simulate", *SMALL, "--cluster", "2x4 a100-40gb", "--trace", trace, "--json", data).stdout
    assert "planned step" in found
    assert "search took" in found
    assert "what devices do" in found
    assert json.loads(trace.read_text())["traceEvents"]
    assert json.loads(data.read_text())["step_s"] > 0


def test_simulate_takes_given_bandwidths_and_memory():
    def step(*options):
        given = (*SMALL, "--cluster", "2x4 a100-40gb", "--method", "data", "--json", "-")
        return json.loads(run("simulate", *given, *options).stdout)

    slow = step("--intra", "1GB/s", "--inter", "100MB/s")
    assert slow["step_s"] > step()["step_s"]
    assert step("--memory", "20GB")["limit_bytes"] == 20e9


def test_a_figure_that_cannot_be_read_is_said_before_anything_else(tmp_path):
    path = tmp_path / "plan.json"
    run("plan", *SMALL, "--cluster", "1x2 h100", "--method", "data", "--save", path)
    assert "--intra: cannot read 'banana'" in refuse("simulate", path, "--intra", "banana")
    assert "name it with --cluster" in refuse("simulate", path, "--intra", "1GB/s")


def test_given_figures_hold_for_hosts_of_every_kind():
    machine = changed(meshwright.cluster("1x2 h100 + 1x4 a100-40gb"), {"inter": 1e9, "memory": 20e9})
    assert [group.inter.bandwidth for group in machine.groups] == [1e9, 1e9]
    assert [group.memory_bytes for group in machine.groups] == [20e9, 20e9]


def test_simulate_reads_a_saved_plan(tmp_path):
    path = tmp_path / "plan.json"
    run("plan", *SMALL, "--cluster", "1x8 h100", "--save", path)
    assert "a saved plan" in run("simulate", path).stdout
    other = json.loads(run("simulate", path, "--cluster", "1x8 a100-40gb", "--json", "-").stdout)
    assert other["num_devices"] == 8


def test_simulate_refuses_what_it_cannot_use(tmp_path):
    assert "no plan file" in refuse("simulate", tmp_path / "nothing.json")
    assert "--intra is '0'" in refuse("simulate", *SMALL, "--cluster", "1x8 h100", "--intra", "0")
    path = tmp_path / "plan.json"
    run("plan", *SMALL, "--cluster", "1x8 h100", "--save", path)
    assert "name it with --cluster" in refuse("simulate", path, "--memory", "20GB")
    assert "has 64" in refuse("simulate", path, "--cluster", "8x8 h100")


def test_validate_prints_rows_and_targets(tmp_path):
    rows = write(tmp_path / "rows.csv", [GPT, GPT | {"row_id": "two", "recompute": "full", "peak_mem_gib": "10"}])
    data = tmp_path / "out.json"
    text = run("validate", "--rows", rows, "--json", data).stdout
    assert "mean error of step time, trust A" in text
    found = json.loads(data.read_text())["rows"]
    assert [row["row_id"] for row in found] == ["one", "two"]
    assert found[1]["published_peak_gib"] == 10
    assert found[0]["published_peak_gib"] is None
    assert all(row["predicted_step_s"] > 0 and row["predicted_peak_gib"] > 0 for row in found)


def test_validate_finds_its_table_or_says_what_to_give(tmp_path, monkeypatch):
    write(tmp_path / "published.csv", [GPT])
    monkeypatch.setenv("MESHWRIGHT_DATA", str(tmp_path))
    assert json.loads(run("validate", "--json", "-").stdout)["rows"]
    monkeypatch.setenv("MESHWRIGHT_DATA", str(tmp_path / "elsewhere"))
    assert "give --rows FILE.csv" in refuse("validate")
    monkeypatch.delenv("MESHWRIGHT_DATA")
    shipped = json.loads(run("validate", "--json", "-").stdout)["rows"]
    assert len(shipped) == 6 and all(abs(row["error"]) < 0.1 for row in shipped)
    assert "there is no file" in refuse("validate", "--rows", tmp_path / "nothing.csv")


def test_validate_refuses_a_table_of_which_it_understands_no_row(tmp_path):
    odd = GPT | {"row_id": "odd", "gpu_type": "abacus"}
    message = refuse("validate", "--rows", write(tmp_path / "odd.csv", [odd]))
    assert "none of the rows" in message and "odd: gpu_type 'abacus' names no device" in message
    assert "1 row could not be understood" in run("validate", "--rows", write(tmp_path / "some.csv", [GPT, odd])).stdout


def test_explore_ranks_clusters(tmp_path):
    picture = tmp_path / "front.svg"
    text = run("explore", *SMALL, "--clusters", "1x8 h100, 1x8 a100-80gb", "--picture", picture).stdout
    assert "clusters by tokens_per_dollar" in text
    assert picture.read_text().startswith("<?xml")
    cheap = run("explore", *SMALL, "--clusters", "1x8 h100,1x8 a100-80gb", "--price", "h100=0.01", "--json", "-").stdout
    assert json.loads(cheap)["offers"][0]["cluster"] == "1x8 h100"


@pytest.mark.slow
def test_explore_looks_for_pipelines_unless_it_is_asked_not_to():
    """With so little memory no single program fits, but stages do."""
    given = ("explore", "mlp", "--clusters", "1x2 h100", "--memory-fraction", "1e-6", "--json", "-")
    whole = ("--no-pipeline", "--microbatches", "1")
    (without,), (staged,) = (json.loads(run(*given, *more).stdout)["offers"] for more in (whole, ("--pipeline",)))
    assert "no plan fits" in without["problem"] and without["step_s"] is None
    assert not staged["problem"] and staged["step_s"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--clusters", " , "), "write some"),
        (("--clusters", "1x8 abacus"), "unknown chip"),
        (("--clusters", "1x8 h100", "--objective", "beauty"), "choose one of"),
        (("--clusters", "1x8 h100", "--price", "h100"), "write CHIP=DOLLARS"),
    ],
)
def test_explore_refuses_what_it_cannot_use(options, message):
    assert message in refuse("explore", *SMALL, *options)
