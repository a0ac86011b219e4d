"""The `meshwright simulate` command: plans a model, or reads a plan, and simulates a step of it."""

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

import meshwright
from meshwright.cli import plan
from meshwright.cli.console import CommandError, Stages, note, show, write_json
from meshwright.cli.options import (
    NO_OPTIONS,
    ArgsOption,
    MemoryOption,
    MeshOption,
    MethodOption,
    MicrobatchesOption,
    PipelineOption,
    RecipeOption,
    RecomputeOption,
    ZooOptions,
    takes_zoo_options,
)
from meshwright.units import format_seconds

if TYPE_CHECKING:
    from meshwright.facade import Plan
    from meshwright.hardware import Cluster


@takes_zoo_options
def simulate_command(
    model: Annotated[
        str,
        typer.Argument(help="A model of the zoo, module:function, or a saved plan (PLAN.json).", show_default=False),
    ],
    cluster: Annotated[
        str | None, typer.Option(help="'HOSTSxDEVICES CHIP', a .toml file, or 'local'; a saved plan has its own.")
    ] = None,
    args: ArgsOption = None,
    mesh: MeshOption = None,
    zoo: ZooOptions = NO_OPTIONS,
    method: MethodOption = "auto",
    microbatches: MicrobatchesOption = "auto",
    recompute: RecomputeOption = "auto",
    pipeline: PipelineOption = "auto",
    recipe: RecipeOption = None,
    intra: Annotated[str | None, typer.Option(help="Bandwidth inside a host, one way a device: 300GB/s.")] = None,
    inter: Annotated[str | None, typer.Option(help="Bandwidth between hosts, one way a device: 25GB/s.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a device: 40GB.")] = None,
    memory_fraction: MemoryOption = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline for ui.perfetto.dev.")] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Write the figures as JSON; '-' writes them to stdout and nothing else."),
    ] = None,
) -> None:
    """Simulate a training step: time, memory and utilisation on a cluster that need not be there."""
    for path in (json_path, trace):
        plan.check_writable(path)
    given = figures_of({"intra": intra, "inter": inter, "memory": memory})
    if model.endswith(".json"):
        planned = meshwright.Plan.load(Path(model))
        machine = None if cluster is None else changed(meshwright.cluster(cluster), given)
        if machine is None and given:
            raise CommandError("--intra, --inter and --memory change a cluster: name it with --cluster")
    else:
        machine = None
        machines = changed(meshwright.cluster(cluster or "local"), given)
        request = plan.Request(
            model=model,
            args=args,
            cluster=machines,
            mesh=plan.parse_mesh(mesh),
            zoo=zoo,
            method=method,
            memory_fraction=memory_fraction,
            microbatches=plan.parse_microbatches(microbatches),
            recompute=recompute,
            pipeline=plan.parse_pipeline(pipeline),
            recipe=recipe,
        )
        with redirect_stdout(sys.stderr):  # output of the user's code is not part of the result
            planned = plan.find_plan(request, Stages())
    simulation = meshwright.simulate(planned, cluster=machine)
    if trace is not None:
        simulation.save_trace(trace)
        note(f"wrote {trace}")
    if json_path is not None:
        write_json(json_path, simulation.to_json())
    if str(json_path) != "-":
        show(_view(planned, simulation))


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
