"""The `meshwright measure` command: measured rates of this machine's devices, as a table or as JSON."""

from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.console import CommandError, Stages, note, show, write_json
from meshwright.cli.options import JsonFlag
from meshwright.console import Table, bare_table
from meshwright.units import format_bytes, format_seconds


def measure_command(
    again: Annotated[bool, typer.Option("--again", help="Measure again, whatever is known already.")] = False,
    classes: Annotated[
        bool, typer.Option(help="Measure classes of operations, too: convolutions, look-ups and others.")
    ] = True,
    as_json: JsonFlag = False,
) -> None:
    """Measure the devices that JAX sees here, once, and print what 'local' means for plans."""
    from meshwright.profiler import cluster, known_survey
    from meshwright.profiler.database import cache_folder, survey_path

    survey = known_survey(remeasure=again)
    if survey is None:
        raise CommandError("this machine is not measured: MESHWRIGHT_MEASURE=never, or it failed; see --again")
    if as_json:
        write_json(Path("-"), survey.to_json())
        return
    machine = cluster("local")
    show(f"{machine.name}: {machine.num_hosts}x{machine.devices_per_host} {machine.chip.name}, {machine.known}\n")
    show(chip_table(machine))
    if machine.num_devices > 1:
        show("")
        show(timing_table(machine))
    if classes and survey.machine.num_processes == 1:
        show("")
        show(class_table(machine, again))
    path = survey_path(cache_folder(), survey.machine)
    if path.exists():
        note(f"measured on {survey.date} in {format_seconds(survey.took_s)}; kept in {path}")
    if survey.was_busy:
        note(f"{survey.load:.0f} processes were running: measure --again on a quiet machine for its best figures")


def class_table(machine: Any, again: bool) -> Table:
    """How classes of operations compare with the model; they are measured if they were not."""
    from meshwright.profiler.measurements import open_database
    from meshwright.rehearsal.learning.calibration import efficiencies
    from meshwright.rehearsal.learning.class_probes import calibrate

    with open_database() as database:
        if again or not efficiencies(database, machine.chip):
            with Stages() as stages:
                for remark in calibrate(machine, database, stages.say):
                    note(remark)
        factors = efficiencies(database, machine.chip)
    table = bare_table("classes of operations", "measured ÷ modelled", right=("measured ÷ modelled",))
    for name, factor in factors.items():
        table.add_row(name, f"{factor:.2f}")
    return table


def chip_table(machine: Any) -> Table:
    """The figures of one device while all of them work."""
    chip = machine.chip
    table = bare_table("of each device, all at work", "figure", right=("figure",))
    table.add_row("products, float32", _rate(chip.peak_flops("float32")))
    table.add_row("products, bfloat16", _rate(chip.peak_flops("bfloat16")))
    table.add_row("memory", format_bytes(chip.memory_bytes))
    table.add_row("memory bandwidth", f"{chip.memory_bandwidth / 1e9:.3g} GB/s")
    table.add_row("fixed time of a kernel", format_seconds(chip.launch_s))
    table.add_row("a division, root, exponential", format_seconds(chip.special_s))
    table.add_row("a row of pixels under a window", format_seconds(chip.fetch_s))
    return table


def timing_table(machine: Any) -> Table:
    """α and β of every collective that was measured."""
    times = "α", "β, s/GB", "a MiB takes"
    table = bare_table("collective", "devices", "over", *times, right=("devices", *times))
    for over, link in (("one process", machine.intra), ("processes", machine.inter)):
        for timing in link.timings:
            mebibyte_s = timing.alpha_s + timing.beta_s * 2**20
            row = (timing.kind.replace("_", "-"), str(timing.size), over, format_seconds(timing.alpha_s))
            table.add_row(*row, f"{timing.beta_s * 1e9:.3g}", format_seconds(mebibyte_s))
    return table


def _rate(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"
