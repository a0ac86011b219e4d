"""`meshwright plan-serving` and `meshwright explore --serve`: tables, JSON, and options that mean nothing."""

import json

import pytest
from typer.testing import CliRunner

from meshwright.cli.app import app

SHORT = ("--tokens-in", "100-200", "--tokens-out", "10")
PROMISE = ("--rate", "5", "--ttft", "0.5", "--tpot", "0.05")


def run(*words, code=0):
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == code, done.output + done.stderr
    return done


def test_a_plan_is_printed_with_what_was_simulated(tmp_path):
    timeline = tmp_path / "timeline.json"
    written = ("--timeline", str(timeline), "--report", str(tmp_path / "page.html"))
    done = run("plan-serving", "llama3-8b", "--cluster", "1x1 h200", *PROMISE, *SHORT, *written)
    assert "llama3-8b on 1x1 h200" in done.stdout and "kept the promise" in done.stdout
    assert json.loads(timeline.read_text())["traceEvents"]
    assert "<!doctype html>" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_plan_is_written_as_json_and_nothing_else():
    done = run("plan-serving", "llama3-8b", "--cluster", "1x1 h200", *PROMISE, *SHORT, "--json", "-")
    plan = json.loads(done.stdout)
    assert plan["enough"] and plan["goodput"] > 5 and plan["simulated"]["attained"] == 1.0


def test_machines_for_a_load_are_ranked_by_price():
    words = (
        "explore",
        "llama3-70b",
        "--serve",
        "--weights",
        "float8",
        "--clusters",
        "1x1 rtx-4090, 1x8 h200, 1x2 h100",
    )
    done = run(*words, *PROMISE, *SHORT, "--json", "-")
    offers = json.loads(done.stdout)["offers"]
    dollars = [offer["dollars_per_hour"] for offer in offers if offer["plan"]]
    assert dollars == sorted(dollars) and len(dollars) == 2
    assert "fits nowhere on 1x1 rtx-4090" in offers[-1]["problem"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan-serving", "llama3-8b", "--cluster", "1x1 h200"), "--rate is missing"),
        (
            ("plan-serving", "llama3-8b", "--cluster", "1x1 h200", *PROMISE, "--tokens-in", "many"),
            "--tokens-in is 'many'",
        ),
        (("plan-serving", "llama-8b", "--cluster", "1x1 h200", *PROMISE), "Unknown model 'llama-8b'"),
        (("plan-serving", "./nowhere", "--cluster", "1x1 h200", *PROMISE), "nowhere does not exist"),
        (("plan-serving", "llama3-8b", "--cluster", "1x1 h200", "--rate", "-5"), "rate is -5"),
        (("explore", "llama3-8b", "--serve"), "--rate is missing"),
        (("explore", "llama3-8b"), "--clusters is None; write some"),
        (("explore", "llama3-8b", "--serve", *PROMISE, "--price", "h100"), "--price is 'h100'"),
    ],
)
def test_options_that_mean_nothing_are_refused_in_one_line(words, message):
    error = run(*words, code=2).stderr
    assert message in error and len(error.strip().splitlines()) == 1
