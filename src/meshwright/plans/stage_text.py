"""Shows the stages of a pipelined plan to people."""

from typing import TYPE_CHECKING

from meshwright.console import Table
from meshwright.plans.stage import Stage
from meshwright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from meshwright.plans.plan import PlanData


def pipeline_text(plan: "PlanData") -> str:
    """How the stages work together, in a line."""
    pipeline = plan.pipeline
    assert pipeline is not None
    chunks = f", {pipeline.interleave} chunks each" if pipeline.interleave > 1 else ""
    again = {"none": "nothing computed again", "selective": "all but products with weights computed again"}
    return (
        f"{_many(len(plan.stages), 'stage')}{chunks}, {pipeline.schedule}, "
        f"{_many(pipeline.num_microbatches, 'microbatch', 'es')}, "
        + again.get(pipeline.checkpoint, "every layer computed again")
    )


def _many(number: int, word: str, ending: str = "s") -> str:
    return f"{number} {word}{ending if number != 1 else ''}"


def stages_view(plan: "PlanData") -> Table:
    """A row for each stage; properties that all stages share are in the title."""
    ways = {stage.method for stage in plan.stages}
    chips = {stage.submesh.chip for stage in plan.stages}
    title = "stages: times of one microbatch, and once a step; bytes of one device"
    if len(ways) == 1:
        title += f"; {next(iter(ways))}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("stage", "layers", "devices", "mesh", *(("split",) if len(ways) > 1 else ())):
        table.add_column(name, overflow="fold")
    for name in ("forward", "backward", "again", "once", "state", "held", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, stage in enumerate(plan.stages):
        place = _devices(stage) + (f" {stage.submesh.chip}" if len(chips) > 1 else "")
        split = (stage.method,) if len(ways) > 1 else ()
        view = "×".join(map(str, stage.mesh.sizes))
        table.add_row(str(number), layers_text(stage), place, view, *split, *_figures(stage))
    return table


def layers_text(stage: Stage) -> str:
    """The layers of a stage: ``0-3``, of one that has several chunks ``0 5 10 15``."""
    chunks = stage.chunks or (stage.layers,)
    return " ".join(f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in chunks)


def _figures(stage: Stage) -> tuple[str, ...]:
    times = (stage.forward.total_s, stage.backward.total_s, stage.recompute.total_s, stage.once_s)
    sizes = (stage.state_bytes, stage.activation_bytes, stage.peak_bytes)
    return (*(format_seconds(t) if t else "" for t in times), *map(format_bytes, sizes))


def _devices(stage: Stage) -> str:
    """Hosts, and the devices of them if not all."""
    place = stage.submesh
    if place.num_hosts > 1:
        return f"hosts {place.first_host}-{place.first_host + place.num_hosts - 1}"
    last = place.first_device + place.devices_per_host - 1
    devices = f"{place.first_device}-{last}" if last > place.first_device else str(last)
    return f"host {place.first_host}/{devices}"
