"""`mw.cluster`: descriptions as `hardware.load` reads them, and ``"local"`` as it was measured here."""

import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path

from meshwright.errors import ClusterError
from meshwright.hardware.clusters import Cluster
from meshwright.hardware.link import Host
from meshwright.hardware.load import cluster as described_cluster
from meshwright.hardware.load import is_local, local_cluster
from meshwright.profiler.database import cache_folder, load_survey, save_survey
from meshwright.profiler.survey import Machine, Survey, this_machine

log = logging.getLogger(__name__)

SETTING = "MESHWRIGHT_MEASURE"
MODES = ("once", "always", "never")
MEET_S = 60.0

# The surveys known to this process, so that two plans of one program are equal even where no file can be kept, and so
# that processes need to meet only once.
_known: dict[tuple[Machine, Path], Survey | None] = {}
_meetings = itertools.count()


def cluster(description: "str | PathLike[str] | Cluster", *, remeasure: bool = False) -> Cluster:
    """Makes a cluster from its description.

    ``"local"`` is measured on first use, which takes seconds, and kept in the user's cache directory:
    see docs/guides/measure.md. With several processes all of them must ask for it, since they measure together.

    Args:
        description: ``"HOSTSxDEVICES CHIP"`` (``"50x4 a100-40gb"``), ``"DEVICES CHIP"`` for one host (``"8 h100"``),
            the path of a TOML file (see ``examples/cluster.toml``), or ``"local"`` for the devices JAX sees here.
        remeasure: Measure ``"local"`` again, whatever is known of it.

    Raises:
        ClusterError: The description cannot be used; or some processes did not come to measure.

    Examples:
        >>> cluster("50x4 a100-40gb").num_devices
        200
    """
    if not is_local(description):
        if remeasure:
            raise ClusterError(f"only 'local' can be measured, not {description!r}: leave remeasure out.")
        return described_cluster(description)
    survey = known_survey(remeasure=remeasure)
    return local_cluster() if survey is None else measured_cluster(local_cluster(), survey)


def known_survey(*, remeasure: bool = False) -> Survey | None:
    """The survey of this machine, made now or earlier; None if measuring is disabled or failed.

    Args:
        remeasure: Measure again, whatever is known.
    """
    mode = os.environ.get(SETTING, "").strip().lower() or MODES[0]
    if mode not in MODES:
        raise ClusterError(f"{SETTING} is {mode!r} but must be one of {', '.join(MODES)}.")
    if mode == "never" and not remeasure:
        return None
    key = (this_machine(), cache_folder())
    if remeasure or key not in _known:
        _known[key] = _shared_survey(*key, read=mode == "once" and not remeasure)
    return _known[key]


def measured_cluster(base: Cluster, survey: Survey) -> Cluster:
    """A cluster with measured figures in place of the catalogue's."""
    from meshwright.profiler.fit import fitted_chip, timings

    outside = timings(survey, across=True)
    # A collective inside processes that was not measured is no slower than one across them.
    inside = timings(survey, across=False) or outside
    intra, inter = replace(base.intra, timings=inside), replace(base.inter, timings=outside)
    chip = replace(fitted_chip(base.chip, survey), intra=intra, inter=inter)
    source = f"measured on {survey.machine.host}, {survey.date}"
    return replace(base, host=Host(base.devices_per_host, intra, inter), chip=chip, known=source)


def _shared_survey(machine: Machine, folder: Path, read: bool) -> Survey | None:
    """The survey of this machine; with several processes that of the first one, in all of them."""
    if machine.num_processes == 1:
        return (load_survey(folder, machine) if read else None) or _measure(machine, folder)
    from meshwright import jax_devices

    if not jax_devices.meet(f"meshwright measures {next(_meetings)}", MEET_S):
        raise ClusterError(
            f"not all {machine.num_processes} processes asked for cluster 'local' within {MEET_S:.0f} s, and they "
            f"measure it together: ask in all of them, or set {SETTING}=never to use the catalogue."
        )
    import jax

    first = jax.process_index() == 0
    saved = load_survey(folder, machine) if first and read else None
    text = jax_devices.broadcast(json.dumps(saved.to_json()).encode() if saved else b"")
    if not text:
        survey = _measure(machine, folder if first else None)
        text = jax_devices.broadcast(json.dumps(survey.to_json()).encode() if survey else b"")
    return Survey.from_json(json.loads(text)) if text else None


def _measure(machine: Machine, folder: Path | None) -> Survey | None:
    """Measures and saves the result; a failure costs only the measurement."""
    from meshwright.profiler.measure import measure

    try:
        with _progress() as say:
            survey = measure(machine, say)
    except Exception as error:
        log.warning("this machine could not be measured, so the catalogue's figures are used: %s", error)
        return None
    if folder is not None:
        save_survey(folder, survey)
    return survey


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows the current measurement on one line of a terminal, which is removed at the end."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from meshwright.console import Console

    with Console(file=sys.stderr).status("measuring this machine, once") as status:
        yield lambda stage: status.update(f"measuring this machine, once: {stage}")
