"""Plans published rows as their authors split them, and simulates the plans with the software that ran them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshwright.cost.rates import step_rates
from meshwright.errors import MeshwrightError
from meshwright.planning import plan
from meshwright.plans.plan import PlanData
from meshwright.simulator.engine import simulate_work
from meshwright.simulator.spmd import spmd_work
from meshwright.simulator.staged import staged_work
from meshwright.simulator.work import COMPUTE, GRADIENTS, Task, Tasks, Work
from meshwright.validation.express import PlannedRow, express
from meshwright.validation.replay import Replay, replay
from meshwright.validation.row import Row


@dataclass(frozen=True)
class PlanReplay:
    """One row, predicted by its plan and by its recipe.

    Attributes:
        recipe: The row as its recipe predicts it.
        method: The method of the plan.
        step_s: The simulated time of a step of the plan; None where there is none.
        problem: Why there is no plan; empty where there is one.
    """

    recipe: Replay
    method: str = ""
    step_s: float | None = None
    problem: str = ""

    @property
    def error(self) -> float | None:
        """Predicted by the plan over published time, less one."""
        published = self.recipe.published_step_s
        return self.step_s / published - 1 if self.step_s and published else None

    @property
    def difference(self) -> float | None:
        """The plan's prediction over the recipe's, less one."""
        predicted = self.recipe.predicted_step_s
        return self.step_s / predicted - 1 if self.step_s and predicted else None

    def __str__(self) -> str:
        """The row in one line."""
        if self.step_s is None:
            return f"{self.recipe.row.id}: no plan, {self.problem}"
        published = self.recipe.published_step_s
        against = "" if self.error is None else f", published {published:.4g} s ({self.error:+.1%})"
        return f"{self.recipe.row.id}: {self.method}, {self.step_s:.4g} s{against}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "row_id": self.recipe.row.id,
            "model": self.recipe.row.text("model"),
            "method": self.method,
            "plan_step_s": self.step_s,
            "recipe_step_s": self.recipe.predicted_step_s,
            "published_step_s": self.recipe.published_step_s,
            "error": self.error,
            "recipe_error": self.recipe.error,
            "problem": self.problem,
        }


def replay_plans(rows: Iterable[Row]) -> Iterator[PlanReplay]:
    """Replays rows one by one; one that cannot be understood, expressed or planned says why."""
    for row in rows:
        replayed = PlanReplay(Replay(row))
        try:
            replayed = PlanReplay(replay(row))
            program = express(row)
            yield replace(replayed, problem=program) if isinstance(program, str) else _planned(replayed, program)
        except MeshwrightError as error:
            yield replace(replayed, problem=str(error))


def _planned(known: PlanReplay, program: PlannedRow) -> PlanReplay:
    """A row with its plan's step: layers repeat, so two depths tell what each further layer adds."""
    layers, (least, most) = program.recipe.shape.layers, program.depths
    step_s = _step_s(program, least)
    if layers != least:
        step_s += (_step_s(program, most) - step_s) * (layers - least) / (most - least)
    return replace(known, method=program.method.name, step_s=step_s)


def _step_s(program: PlannedRow, layers: int) -> float:
    return simulate_work(plan_work(plan_layers(program, layers), program, layers)).step_s


def plan_layers(program: PlannedRow, layers: int) -> PlanData:
    """The plan of a row's program with so many layers."""
    example = program.build(layers)
    cluster, mesh = program.roomy_cluster, None if program.mesh is None else program.mesh.sizes
    args = (example.state, example.batch)
    method = replace(program.method, recompute="as written")  # a published row says what was recomputed
    return plan(example.train_step, *args, cluster=cluster, mesh=mesh, method=method)


def plan_work(found: PlanData, program: PlannedRow, layers: int) -> Work:
    """The work of a row: its plan of one microbatch, as often as a step needs it."""
    recipe = program.recipe
    if program.mesh is None:
        return replace(staged_work(found, program.roomy_cluster), fixed_s=program.software.fixed_s)
    work = spmd_work(found, program.mesh, program.software)
    count = recipe.num_microbatches
    if count == 1:
        return work
    chunk = work.chunks[0]
    backward = chunk.backward if recipe.zero == 3 else _accumulating(chunk.backward, program, layers)
    return replace(
        work,
        chunks=(replace(chunk, backward=backward),),
        num_microbatches=count,
        model_flops=count * work.model_flops,
        tokens=count * work.tokens,
    )


def _accumulating(tasks: Tasks, program: PlannedRow, layers: int) -> Tasks:
    """A backward pass that adds gradients to those of earlier microbatches instead of exchanging them."""
    recipe = program.recipe
    kept = [place for place, task in enumerate(tasks) if task.lane != GRADIENTS]
    renumbered = {place: number for number, place in enumerate(kept)}
    adding = [
        tasks[place]._replace(needs=tuple(renumbered[n] for n in tasks[place].needs if n in renumbered))
        for place in kept
    ]
    added = 8.0 if recipe.stack.fused_accumulation else 2 + 2 * recipe.stack.gradient_bytes
    seconds = step_rates(recipe.cluster.chip).stream_s(added * layers * recipe.layer_params / recipe.tensor)
    return (*adding, Task("accumulate gradients", COMPUTE, "compute", seconds))
