"""Time of what a recipe's devices exchange: groups of devices at some stride, priced by the catalogue's collectives."""

from dataclasses import dataclass

from meshwright.hardware import Cluster
from meshwright.hardware.groups import group_of
from meshwright.simulator.work import COLLECTIVE, Task

INSIDE, ACROSS = "inside hosts", "between hosts"

#: A kind of link that all devices of a host share.
SHARED_ADAPTER = "ethernet"


@dataclass(frozen=True)
class Exchange:
    """Collectives of one cluster whose devices are numbered with tensor-parallel neighbours next to each other.

    Attributes:
        cluster: The machines.
        network: Part of a network's collective rate that a busy cluster keeps.
    """

    cluster: Cluster
    network: float

    def seconds(self, kind: str, size: int, stride: int, num_bytes: float) -> float:
        """Seconds of a collective among `size` devices that lie `stride` apart, all groups at once."""
        if size == 1 or num_bytes <= 0:
            return 0.0
        mesh = self.cluster.mesh(self._sizes(size, stride))
        alone = float(mesh.collective_s(kind, (1,), num_bytes))
        return alone / (self.network if self.link(size, stride) == ACROSS else 1.0)

    def link(self, size: int, stride: int) -> str:
        """The slowest wires that such a group crosses."""
        return ACROSS if group_of(self.cluster, self._sizes(size, stride), (1,)).num_domains > 1 else INSIDE

    def send_s(self, stage: int, stage_size: int, num_bytes: float) -> float:
        """Seconds of sending from every device of a stage to its partner on the next one; the last sends to the first."""
        hosts = [device // self.cluster.devices_per_host for device in self._partners(stage, stage_size)]
        if hosts[0] == hosts[1]:
            return self.seconds("permute", 2, 1, num_bytes)
        alone = self.seconds("permute", self.cluster.num_devices // stage_size, stage_size, num_bytes)
        if self.cluster.inter.kind != SHARED_ADAPTER:
            return alone
        return alone * min(1.0, stage_size / self.cluster.devices_per_host)  # the others leave their share to it

    def _partners(self, stage: int, stage_size: int) -> tuple[int, int]:
        last = stage * stage_size + stage_size - 1
        return last, (last + stage_size) % self.cluster.num_devices

    def task(
        self, name: str, lane: str, kind: str, size: int, stride: int, num_bytes: float, needs: tuple[int, ...] = ()
    ) -> Task:
        """A collective as a task."""
        seconds = self.seconds(kind, size, stride, num_bytes)
        return Task(name, COLLECTIVE, lane, seconds, self.link(size, stride), needs, num_bytes)

    def _sizes(self, size: int, stride: int) -> tuple[int, int, int]:
        return self.cluster.num_devices // (size * stride), size, stride
