"""Code that asks for devices while it is traced for a cluster finds those of the cluster, wherever it runs.

Kernels and models ask JAX for the platform, the kind of device or the compute capability while they are traced, and
trace another program, or none, if they find a laptop. The answers are those of the cluster; nothing can run on it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NoReturn

import jax

from meshwright.hardware import Chip, Cluster
from meshwright.jax_compat.kernels import choosing, imitating, platform_at_hand

# JAX's names of the platforms of each maker's chips, the name that devices have first. XLA's own names follow.
_PLATFORMS = {"NVIDIA": ("gpu", "cuda"), "AMD": ("gpu", "rocm"), "Google": ("tpu",)}
_CORES = {"NVIDIA": "core_count", "AMD": "core_count", "Google": "num_cores"}  # as JAX calls their number


@contextmanager
def traced_for(cluster: Cluster | None) -> Iterator[None]:
    """A context in which functions are traced as on a cluster.

    For the devices at hand, for CPUs, and where there is no cluster, code finds the devices at hand.
    `jax.lax.platform_dependent` is traced as the branch that will run: the others would count towards the step.

    Examples:
        >>> import jax, meshwright as mw
        >>> with traced_for(mw.cluster("2x8 h100")):
        ...     jax.make_jaxpr(lambda x: x * jax.device_count())(1)
        { lambda ; a:i32[]. let b:i32[] = mul a 16:i32[] in (b,) }
    """
    client = _client(cluster)
    platforms = (platform_at_hand(),) if client is None else client.platforms
    with choosing(platforms), imitating(client):
        yield


def is_imitated(cluster: Cluster | None) -> bool:
    """Whether `traced_for` makes a difference."""
    return _client(cluster) is not None


@lru_cache(maxsize=64)  # a client is compared by identity, and functions traced for it are kept in JAX's caches
def _client(cluster: Cluster | None) -> "PlannedClient | None":
    if cluster is None or cluster.chip.vendor not in _PLATFORMS:
        return None
    return None if jax.devices()[0].device_kind in cluster.chip.device_kinds else PlannedClient(cluster)


@dataclass(frozen=True, eq=False)
class PlannedClient:
    """What JAX calls a client, with the devices of a cluster; those of a mixed one have its first chip."""

    cluster: Cluster

    def answers(self, platform: Any) -> bool:
        """Whether it is a client of a platform; None is the default one."""
        return platform in (None, self, *self.platforms)

    @property
    def platforms(self) -> tuple[str, ...]:
        """All names of its platform."""
        return _PLATFORMS[self.cluster.chip.vendor]

    @property
    def platform(self) -> str:
        return self.platforms[0]

    @property
    def platform_version(self) -> str:
        return f"{self.platforms[-1]}, planned for {self.cluster.name}"

    @cached_property
    def _devices(self) -> list["PlannedDevice"]:
        return [PlannedDevice(self, number) for number in range(self.cluster.num_devices)]

    def devices(self) -> list["PlannedDevice"]:
        return self._devices

    def local_devices(self) -> list["PlannedDevice"]:
        return self._devices[: self.cluster.devices_per_host]

    def device_count(self) -> int:
        return self.cluster.num_devices

    def local_device_count(self) -> int:
        return self.cluster.devices_per_host

    def process_index(self) -> int:
        return 0


@dataclass(frozen=True)
class PlannedDevice:
    """One device of a planned cluster."""

    client: PlannedClient
    id: int

    @property
    def chip(self) -> Chip:
        return self.client.cluster.chip

    @property
    def platform(self) -> str:
        return self.client.platform

    @property
    def device_kind(self) -> str:
        return (*self.chip.device_kinds, self.chip.name)[0]

    @property
    def process_index(self) -> int:
        return self.id // self.client.cluster.devices_per_host

    @property
    def local_hardware_id(self) -> int:
        return self.id % self.client.cluster.devices_per_host

    @property
    def coords(self) -> tuple[int, ...]:
        """The place of a TPU in its torus, by which JAX orders the devices of a mesh: x first."""
        cluster = self.client.cluster
        if self.chip.vendor != "Google":
            return self._unknown("coords")
        left, found = self.id, []
        for size in (*cluster.torus(cluster.num_devices), 1, 1)[:3]:
            found.append(left % size)
            left //= size
        return tuple(found)

    @property
    def core_on_chip(self) -> int:
        return 0 if self.chip.vendor == "Google" else self._unknown("core_on_chip")

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.chip.memory_bytes, "bytes_in_use": 0}

    def __getattr__(self, name: str) -> str | int:
        cores, chip = _CORES[self.chip.vendor], self.chip
        figures: dict[str, str | int | None] = {"compute_capability": chip.compute_capability, cores: chip.cores}
        return figures.get(name) or self._unknown(name)

    def _unknown(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the function asks for {name!r} of the device it is planned for, a {self.chip.name}, whose file in the "
            "catalogue does not have it"
        )
