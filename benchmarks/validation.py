"""How far off are simulated steps from published ones, on rows that were fitted and on sources that were held out?

Prints every row and the summary of `meshwright validate`, then fits the constants of `cost/rates.toml` again without
each source in turn, and predicts that source with what the others tell. The constants enter the fit by their
first-order effect on the logarithm of each step's time; each source weighs as the root of its number of rows.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

sys.path.insert(0, str(Path(__file__).parent))

from report import table

from meshwright.cost.attention import generation
from meshwright.cost.rates import step_rates
from meshwright.simulator.engine import simulate_work
from meshwright.simulator.transformer.work import recipe_work
from meshwright.validation.replay import read_rows, replay_rows
from meshwright.validation.row import Row, recipe_of
from meshwright.validation.validation import Validation

DATA = Path(os.environ.get("MESHWRIGHT_DATA", Path(__file__).parents[2] / "shared" / "data"))
#: What is fitted, with the change by which its effect is read off; generations are their `sustained` rates.
STEPS = {
    "streaming": 0.05,
    "contention": 0.1,
    "network": 0.1,
    "float8": 0.05,
    "volta": 0.03,
    "ampere": 0.03,
    "hopper": 0.03,
}
#: How firmly each constant is held where it is, in units of its step: a prior, lest few rows move it far.
_HOLD = 0.02


def log_error(row: Row, change: dict[str, float]) -> float:
    """Logarithm of predicted over published time, with some constants changed."""
    recipe = recipe_of(row)
    prices = step_rates(recipe.cluster.chip)
    own = {name: getattr(prices.constants, name) + by for name, by in change.items() if hasattr(prices.constants, name)}
    sustained = prices.sustained + change.get(generation(recipe.cluster.chip), 0.0)
    prices = replace(prices, constants=replace(prices.constants, **own), sustained=sustained)
    return float(np.log(simulate_work(recipe_work(recipe, row.id, prices)).step_s / row.step_s))


def source_of(row: Row) -> str:
    """Who published a row: tables of one project are one source."""
    words = row.text("source")
    names = ("SC'21", "Korthikanti", "README 2020", "CI golden", "Alpa", "torchtitan", "MosaicML", "fms-fsdp")
    return next((name for name in (*names, "tpu-recipes", "JAX-Toolbox") if name in words), words)


def fit(errors_r: np.ndarray, effects_rc: np.ndarray, weights_r: np.ndarray) -> np.ndarray:
    """Changes of the constants that make the weighted absolute errors least."""
    scale = np.array(list(STEPS.values()))

    def loss(change: np.ndarray) -> float:
        left = errors_r + effects_rc @ change
        return float(weights_r @ np.sqrt(left**2 + 1e-4) + _HOLD * np.sum((change / scale / 4) ** 2))

    return np.asarray(minimize(loss, np.zeros(len(STEPS)), method="BFGS").x)


def held_out(rows: list[Row]) -> None:
    """Prints the errors of every source when the constants are fitted on the others."""
    base = np.array([log_error(row, {}) for row in rows])
    effects = np.array(
        [
            [(log_error(row, {name: by}) - e) / by for name, by in STEPS.items()]
            for row, e in zip(rows, base, strict=True)
        ]
    )
    sources = np.array([source_of(row) for row in rows])
    weights = np.array([1 / np.sqrt((sources == source).sum()) for source in sources])
    found, held = [], np.zeros(len(rows))
    for source in dict.fromkeys(sources):
        mine = sources == source
        change = fit(base[~mine], effects[~mine], weights[~mine])
        held[mine] = np.abs(np.expm1(base[mine] + effects[mine] @ change))
        shipped = np.abs(np.expm1(base[mine]))
        moved = ", ".join(
            f"{name} {value:+.2f}" for name, value in zip(STEPS, change, strict=True) if abs(value) >= 0.015
        )
        found.append((source, mine.sum(), f"{shipped.mean():.1%}", f"{held[mine].mean():.1%}", moved or "–"))
    trusted = np.array([row.trust == "A" for row in rows])
    for name, mask in (("all", np.ones(len(rows), bool)), ("trust A", trusted)):
        shipped = np.abs(np.expm1(base[mask]))
        within = f"median {np.median(held[mask]):.1%}, within 15%: {np.mean(held[mask] <= 0.15):.0%}"
        found.append((f"**{name}**", mask.sum(), f"{shipped.mean():.1%}", f"{held[mask].mean():.1%}", within))
    header = ("source", "rows", "mean error as shipped", "mean error, source held out", "how the constants would move")
    table("Validation held out", "Do the constants hold for sources that they were not fitted on?", header, found)


def main() -> None:
    if not (DATA / "published.csv").exists():
        print(f"no published results in {DATA}: set MESHWRIGHT_DATA to the folder that holds published.csv")
        return
    rows = read_rows(DATA / "published.csv")
    found = Validation(tuple(replay_rows(rows)))
    print(found)
    question = "How far off are simulated steps from published ones?"
    reached = [
        (t.name, t.count, f"{t.value:.1%}", f"{'≥' if t.least else '≤'} {t.bound:.0%}", "yes" if t.reached else "no")
        for t in found.targets
        if t.value is not None
    ]
    table("Validation", question, ("figure", "over", "reached", "target", ""), reached)
    held_out(rows)


if __name__ == "__main__":
    main()
