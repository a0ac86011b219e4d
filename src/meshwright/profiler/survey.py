"""The measurements of one machine: the machine, the date, and every reading, as plain data for a file."""

import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.schema import built

FORMAT = 2  # 1 knew neither convolutions nor special functions


@dataclass(frozen=True)
class Machine:
    """The machine that a measurement holds for: another value of any attribute is another machine.

    Attributes:
        host: Name of the host; with several processes that of the first one.
        platform: JAX's name of the backend, e.g. ``"cpu"`` or ``"gpu"``.
        device_kind: JAX's name of the devices.
        num_processes: Number of processes.
        devices_per_process: Number of devices in each.
        num_cpus: Number of processor cores that this process may use.
        xla_flags: Flags for XLA that may change the compiled program, without those for its logs and dumps.
        jax: Version of JAX.
        jaxlib: Version of jaxlib.
    """

    host: str
    platform: str
    device_kind: str
    num_processes: int
    devices_per_process: int
    num_cpus: int
    xla_flags: str
    jax: str
    jaxlib: str

    @property
    def num_devices(self) -> int:
        return self.num_processes * self.devices_per_process


def num_cpus() -> int:
    """The processors that this process may use; all of the machine where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def this_machine() -> Machine:
    """The machine that this process runs on."""
    import jax
    import jaxlib

    device = jax.devices()[0]
    return Machine(
        host=platform.node(),
        platform=device.platform,
        device_kind=device.device_kind,
        num_processes=jax.process_count(),
        devices_per_process=jax.local_device_count(),
        num_cpus=num_cpus(),
        xla_flags=" ".join(sorted(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "xla_dump" not in flag)),
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
    )


@dataclass(frozen=True)
class Reading:
    """One thing that was measured, all devices at once.

    Attributes:
        what: ``"launch"``, ``"matmul"``, ``"memory"``, ``"special"``, ``"window"`` or a kind of collective.
        amount: The work of one device each time: FLOPs of a product, bytes that it reads and writes, special functions,
            fetches under a convolution's window, bytes of a collective as `Mesh.collective_s` counts them.
        seconds: Time of doing it once.
        dtype: Type of the numbers.
        size: Number of devices in a group of a collective.
        across: Whether its groups reach over several processes.
        repeats: How often it was done in one run of the program.
        rounds: How many runs were timed; the quickest counts.
        flops: FLOPs that are done beside the amount.
    """

    what: str
    amount: float
    seconds: float
    dtype: str = "float32"
    size: int = 1
    across: bool = False
    repeats: int = 1
    rounds: int = 1
    flops: float = 0.0


@dataclass(frozen=True)
class Survey:
    """All readings of one machine.

    Attributes:
        machine: Where they hold.
        date: When they were taken, ``"2026-11-18"``.
        took_s: How long it took.
        load: How many processes were running before it began; above the number of cores, others were in the way.
        memory_bytes: Memory of each device as the system reports it; None where it does not.
        readings: The readings.
    """

    machine: Machine
    date: str
    took_s: float
    load: float
    memory_bytes: int | None
    readings: tuple[Reading, ...]

    @property
    def was_busy(self) -> bool:
        """Whether others used so much of the machine that the figures may be too low."""
        return self.machine.platform == "cpu" and self.load > self.machine.num_cpus

    def to_json(self) -> dict[str, Any]:
        """Plain data from which `from_json` makes the same survey again."""
        how = "quickest of several runs of a loop on all devices at once, less a run of no trips, divided by the trips"
        return {"format": FORMAT, "how": how, **asdict(self), "readings": [asdict(r) for r in self.readings]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Survey":
        """The inverse of `to_json`.

        Raises:
            ValueError: It is of another format, or damaged.
        """
        form = data.get("format") if isinstance(data, dict) else None
        if form != FORMAT:
            raise ValueError(f"not a survey of a machine: format {form!r} instead of {FORMAT}")
        survey = built(cls, {name: value for name, value in data.items() if name not in ("format", "how")}, "survey")
        if not all(0 < r.seconds < 1e6 and 0 <= r.amount < 1e18 for r in survey.readings) or survey.memory_bytes == 0:
            raise ValueError("times and amounts must be above 0")
        return survey
