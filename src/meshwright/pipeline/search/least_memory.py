"""For a model that does not fit: the least memory with which some pipeline would fit."""

import numpy as np

from meshwright.pipeline.prices.kernels import least_peak
from meshwright.pipeline.search.device_line import Line, orders
from meshwright.pipeline.search.search import PipelineSearch
from meshwright.schedules import in_flight


def note_nearest(search: PipelineSearch) -> None:
    """Finds the stages whose fullest needs least memory; where hosts differ, as a fraction of the device's memory.

    More rows of a microbatch need more memory, unless they divide among more replicas.
    """
    search.say("looking for the least memory that suffices")
    thorough = PipelineSearch(search.catalogue.unpruned(), search.flow, search.say)
    cluster, sizes = search.catalogue.cluster, search.catalogue.microbatches
    few = [n for n in sizes if n <= max(group.num_devices for group in cluster.groups)] or sizes[:1]
    for rows in few:
        for checkpoint in search.checkpoints:
            for order in orders(len(cluster.groups)):
                need, stages = _least(thorough, rows, checkpoint, Line(cluster, order))
                words = f"of {stages} stages with checkpoint={checkpoint}"
                search.note_misfit(need * min(search.catalogue.limits), words)


def _least(search: PipelineSearch, rows: int, checkpoint: str, line: Line) -> tuple[float, int]:
    """The least need of the fullest stage, as a fraction of its memory, and the number of stages."""
    tried = [(g, n, search.options(g, n, rows, checkpoint)) for g, n in line.kinds]
    found = [(g, n, options) for g, n, options in tried if options is not None]
    if not found:
        return np.inf, 0
    most = min(search.num_layers, line.num_units)
    schedule = "1f1b" if search.trains else "inference"  # these hold no more than any other schedule
    held = in_flight(schedule, most, search.catalogue.rows.batch // rows)[::-1]
    need = np.array([options.least_bytes(max(held)) / options.limit for _, _, options in found])
    size = np.array([n // line.unit for _, n, _ in found])
    allowed = np.array([line.allowed(g, n) for g, n, _ in found])
    by_number = least_peak(need, size, allowed, np.array(held))
    return float(by_number.min()), int(by_number.argmin())
