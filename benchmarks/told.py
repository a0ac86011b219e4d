"""Is `Auto`, as simulated, quicker than what was published, as simulated?

Rows of the table of published runs that a program of the zoo can express: the whole step, of all layers and the whole
batch, with the recomputation that its authors wrote. It is planned twice on their machines: split and cut into
microbatches as they did, with as much memory as that takes, since it ran; and by `mw.Auto(memory_fraction=1)`, which
must fit. Both are simulated with the software that Meshwright runs on, so the published step itself is not compared.

    python benchmarks/told.py [WORD …] [--jobs 1] [--seconds 3600]    # the rows with these words; others are kept
"""

import math
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import sliced_table

from meshwright import Plan
from meshwright.cost.rates import cluster_rates

DATA = Path(os.environ.get("MESHWRIGHT_DATA", Path(__file__).parents[2] / "shared" / "data"))
COLUMNS = ("row", "model and machines", "as published", "ms", "Auto", "ms", "quicker", "seconds to plan", "why")
NONE = "–"
WIDE = 1.3  # times quicker: from here a row says where the time goes


def compared(row_id: str) -> list[str]:
    """A row: the steps of the published configuration and of `Auto`."""
    import time

    import meshwright as mw
    from meshwright.parallelism.sentence import plain_sentence
    from meshwright.validation.express import express
    from meshwright.validation.replay import read_rows

    row = next(row for row in read_rows(DATA / "published.csv") if row.id == row_id)
    program = express(row)
    assert not isinstance(program, str), program
    recipe = program.recipe
    example = program.build(recipe.shape.layers, whole=True)
    method = replace(program.method, recompute="as written")
    if program.mesh is not None:
        method = replace(method, microbatches=recipe.num_microbatches)
    args = (example.train_step, example.state, example.batch)
    name = f"{row.text('model')}, {recipe.cluster.num_devices} {recipe.cluster.chip.name}"
    try:
        shape = None if program.mesh is None else program.mesh.sizes
        theirs = mw.plan(*args, cluster=program.roomy_cluster, mesh=shape, method=method, on_progress=str)
        started = time.process_time()
        ours = mw.plan(*args, cluster=recipe.cluster, method=mw.Auto(memory_fraction=1.0), on_progress=str)
    except mw.MeshwrightError as error:
        return [row_id, name, method.name, NONE, f"{type(error).__name__}: {error}"[:200], NONE, NONE, NONE, ""]
    seconds = time.process_time() - started
    return [
        row_id,
        name,
        plain_sentence(theirs),
        f"{1e3 * theirs.step_s:.1f}",
        plain_sentence(ours),
        f"{1e3 * ours.step_s:.1f}",
        f"{theirs.step_s / ours.step_s:.3f}×",
        f"{seconds:.0f}",
        why(theirs, ours) if theirs.step_s > WIDE * ours.step_s else "",
    ]


def why(theirs: Plan, ours: Plan) -> str:
    """Where the time of two plans goes, in one sentence."""
    return f"As published, devices {spent(theirs)}; by Auto they {spent(ours)}."


def spent(plan: Plan) -> str:
    """How long devices compute, compute again and wait; of stages, how many there are to fill."""
    if plan.stages:
        return f"take {1e3 * plan.step_s:.0f} ms in {len(plan.stages)} stages"
    rates = cluster_rates(plan.mesh.cluster)
    again_s = sum(op.load.trips * rates.load_s(op.load) for op in plan.ops if op.load and op.load.recomputed)
    busy_s = plan.step_s - plan.cost.waiting - again_s
    return f"compute {1e3 * busy_s:.0f} ms, again {1e3 * again_s:.0f} ms, and wait {1e3 * plan.cost.waiting:.0f} ms"


def expressed() -> list[str]:
    """The rows that can be planned, those of the smallest models first."""
    from meshwright.errors import MeshwrightError
    from meshwright.validation.express import express
    from meshwright.validation.replay import read_rows

    sizes = {}
    for row in read_rows(DATA / "published.csv"):
        try:
            program = express(row)
        except MeshwrightError:
            continue
        if not isinstance(program, str):
            sizes[row.id] = program.recipe.shape.layers
    return sorted(sizes, key=lambda row_id: sizes[row_id])


def summary(rows: list[list[str]]) -> list[str]:
    """The geometric mean over the rows, and how many are slower."""
    ratios = [float(row[6].rstrip("×")) for row in rows if row[6] != NONE]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
    slower = sum(ratio < 0.99 for ratio in ratios)
    return [
        f"all {len(ratios)}",
        "geometric mean",
        "",
        "",
        f"{slower} slower by more than 1%",
        "",
        f"{mean:.3f}×",
        "",
        "",
    ]


def main() -> None:
    """Compares the rows, each in a process of its own."""
    sliced_table("Told", __doc__ or "", COLUMNS, compared, {name: (name,) for name in expressed()}, summary)


if __name__ == "__main__":
    main()
