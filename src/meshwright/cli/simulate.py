"""The `meshwright simulate` command: plans a model, or reads a plan, and simulates a step of it."""

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

import meshwright
from meshwright.cli import plan
from meshwright.cli.console import CommandError, Stages, give, note
from meshwright.cli.options import json_option
from meshwright.cli.request import Request, takes_request
from meshwright.units import format_seconds

if TYPE_CHECKING:
    from meshwright.facade import Plan
    from meshwright.hardware import Cluster


_ModelArgument = Annotated[
    str, typer.Argument(help="A model of the zoo, module:function, or a saved plan (PLAN.json).", show_default=False)
]
_ClusterOption = Annotated[
    str | None, typer.Option(help="'HOSTSxDEVICES CHIP', a .toml file, or 'local'; a saved plan has its own.")
]


@takes_request(
    *("model", "cluster", "args", "mesh", "zoo", "method", "microbatches", "recompute", "pipeline", "recipe"),
    "memory_fraction",
    model=(_ModelArgument, Parameter.empty),
    cluster=(_ClusterOption, None),
)
def simulate_command(
    request: Request,
    intra: Annotated[str | None, typer.Option(help="Bandwidth inside a host, one way a device: 300GB/s.")] = None,
    inter: Annotated[str | None, typer.Option(help="Bandwidth between hosts, one way a device: 25GB/s.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a device: 40GB.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline for ui.perfetto.dev.")] = None,
    json_path: Annotated[Path | None, json_option("the figures")] = None,
) -> None:
    """Simulate a training step: time, memory and utilisation on a cluster that need not be there."""
    for path in (json_path, trace):
        plan.check_writable(path)
    given, machine = figures_of({"intra": intra, "inter": inter, "memory": memory}), None
    if request.model.endswith(".json"):
        planned = meshwright.Plan.load(Path(request.model))
        machine = None if request.cluster is None else changed(meshwright.cluster(request.cluster), given)
        if machine is None and given:
            raise CommandError("--intra, --inter and --memory change a cluster: name it with --cluster")
    else:
        machines = changed(meshwright.cluster(request.cluster or "local"), given)
        with redirect_stdout(sys.stderr):  # output of the user's code is not part of the result
            planned = plan.find_plan(replace(request, cluster=machines), Stages())
    simulation = meshwright.simulate(planned, cluster=machine)
    if trace is not None:
        simulation.save_trace(trace)
        note(f"wrote {trace}")
    give(json_path, simulation.to_json(), _view(planned, simulation))


def figures_of(given: dict[str, str | None]) -> dict[str, float]:
    """The figures of a cluster that the user gives, in bytes and bytes per second."""
    from meshwright.hardware.tables import quantity

    return {name: quantity(text, f"--{name}") for name, text in given.items() if text is not None}


def changed(machine: "Cluster", figures: dict[str, float]) -> "Cluster":
    """A cluster with other figures, on hosts of every kind."""
    from meshwright.hardware.clusters import mixed

    if not figures:
        return machine
    if machine.mixed:
        return mixed(machine.name, [changed(group, figures) for group in machine.mixed])
    links = {
        name: replace(getattr(machine.host, name), bandwidth=figures[name])
        for name in ("intra", "inter")
        if name in figures
    }
    chip = replace(machine.chip, memory_bytes=int(figures["memory"])) if "memory" in figures else machine.chip
    return replace(machine, host=replace(machine.host, **links), chip=chip)


def _view(plan: "Plan", simulation: Any) -> RenderableType:
    from meshwright.explain.show.plan_text import plan_view

    searched = f"search took {format_seconds(plan.solution.seconds)}" if plan.solution.seconds else "a saved plan"
    step, apart = format_seconds(plan.step_s), format_seconds(plan.cost.total)
    cost = Text(f"planned step {step}; cost, of kernels that run alone one after the other, {apart}; {searched}\n")
    return Group(plan_view(plan), Text(), cost, simulation)
