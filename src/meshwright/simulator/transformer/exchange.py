"""The time of a recipe's exchanges: groups of devices at some stride, priced by the catalogue's collectives."""

from dataclasses import dataclass, field

from meshwright.cost.sustained import SHARED_ADAPTER, link_of, sustained_s
from meshwright.hardware import Cluster, Mesh
from meshwright.simulator.work import COLLECTIVE, Task


@dataclass(frozen=True)
class Exchange:
    """Collectives of one cluster whose devices are numbered with tensor-parallel neighbours next to each other.

    Attributes:
        cluster: The machines.
        network: Part of a network's collective rate that a busy cluster keeps.
    """

    cluster: Cluster
    network: float
    _groups: dict[tuple[int, int], tuple[Mesh, str]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def seconds(self, kind: str, size: int, stride: int, num_bytes: float) -> float:
        """Seconds of a collective among `size` devices with a distance of `stride`, all groups at once."""
        if size == 1 or num_bytes <= 0:
            return 0.0
        return sustained_s(self._group(size, stride)[0], kind, (1,), num_bytes, self.network)

    def _group(self, size: int, stride: int) -> tuple[Mesh, str]:
        """The mesh whose middle axis such groups are, and the slowest wires that they cross."""
        if (size, stride) not in self._groups:
            mesh = self.cluster.mesh((self.cluster.num_devices // (size * stride), size, stride))
            self._groups[size, stride] = mesh, link_of(mesh, (1,))
        return self._groups[size, stride]

    def send_s(self, stage: int, stage_size: int, num_bytes: float) -> float:
        """Seconds of sending from each device of a stage to its partner on the next; the last sends to the first."""
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
        return Task(name, COLLECTIVE, lane, seconds, self._group(size, stride)[1] if size > 1 else "", needs, num_bytes)
