"""The stages of a pipelined plan: plain data, like the plan they are part of."""

from dataclasses import astuple, dataclass
from math import prod
from typing import Annotated

from meshwright.errors import ClusterError
from meshwright.hardware import Cluster, Mesh
from meshwright.plans.tensor import Tensor
from meshwright.schema import MADE, Amount, Between, Count, Size

Microbatches = Annotated[int, Between(1, 2**16)]  # of a step; a schedule lists each of them

# The collectives that sum the gradients of all replicas and return parameters to them, once a step and with every
# microbatch, by ZeRO stage.
EXCHANGED = (
    (("all_reduce",), ()),
    (("reduce_scatter", "all_gather"), ()),
    (("all_gather",), ("reduce_scatter",)),
    ((), ("all_gather", "all_gather", "reduce_scatter")),
)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the stages work together.

    Attributes:
        schedule: A name of `pipeline.schedules`.
        num_microbatches: The number of microbatches of a batch.
        interleave: Chunks of the model on each stage.
        checkpoint: The recomputation in the backward pass: ``none``, ``selective`` or ``full``.
    """

    schedule: str
    num_microbatches: Microbatches
    interleave: Microbatches
    checkpoint: str


@dataclass(frozen=True, slots=True)
class Submesh:
    """The devices of one stage: some of one host, or all of several.

    Attributes:
        first_host: Number of its first host in the cluster.
        num_hosts: The number of its hosts.
        first_device: Number of its first device in that host.
        devices_per_host: The number of devices that it has on each host.
        chip: Name of the chips.
    """

    first_host: Size
    num_hosts: Count
    first_device: Size
    devices_per_host: Count
    chip: str

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    def machines(self, cluster: Cluster) -> Cluster:
        """The submesh's own machines, as a cluster."""
        first = 0
        for group in cluster.groups:
            if self.first_host < first + group.num_hosts:
                return group.part(self.num_hosts, self.devices_per_host)
            first += group.num_hosts
        raise ClusterError(f"host {self.first_host} of a stage is not in cluster {cluster.name!r} of {first} hosts")


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one part of a stage's work.

    Attributes:
        compute_s: Compute.
        communication_s: Communication.
        product_s: The part of ``compute_s`` in matrix products; the rest moves bytes through memory.
        replicas_s: The part of ``communication_s`` between replicas.
        stages_s: The part with other stages, for parameters that they share; the rest is inside a replica.
    """

    compute_s: Amount
    communication_s: Amount
    product_s: Amount = 0.0
    replicas_s: Amount = 0.0
    stages_s: Amount = 0.0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.communication_s

    @property
    def inside_s(self) -> float:
        """The part of ``communication_s`` inside a replica."""
        return self.communication_s - self.replicas_s - self.stages_s

    @property
    def moving_s(self) -> float:
        """The part of ``compute_s`` that moves bytes."""
        return self.compute_s - self.product_s

    def __add__(self, other: "StageTime") -> "StageTime":
        return StageTime(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, factor: float) -> "StageTime":
        """All of these seconds times a factor."""
        return StageTime(*(factor * part for part in astuple(self)))


@dataclass(frozen=True, slots=True)
class Stage:
    """A range of layers on a submesh; times and bytes are those of all its chunks together, on one device.

    Attributes:
        layers: First layer, and one past the last; of an interleaved stage those of its first chunk.
        submesh: Its devices.
        mesh: The logical view of them; axis x splits the batch of every microbatch.
        method: How it is split, in words.
        forward, backward: Of one microbatch; ``backward`` without recomputation.
        recompute: The recomputation of one microbatch.
        gradients: The reduction of the gradients, once a step; it may overlap the backward pass.
        update: The optimizer, once a step.
        weights_fraction: The part of ``backward``'s compute that computes gradients of weights.
        send_bytes: Activations that a device sends to the next stage, and their gradients that come back; one
            microbatch, one way, and of one chunk, where there are several. 0 for the last stage.
        transfer_s: Seconds of that, one way.
        state_bytes: Parameters, gradients, optimizer.
        activation_bytes: Held for each microbatch in flight.
        transient_bytes: Temporaries while one microbatch is processed.
        peak_bytes: The most under the plan's schedule.
        chunks: Layers of each chunk of an interleaved stage; else `layers` alone.
        tensors: Its parameters and optimizer state, split over `mesh`.
        flops: FLOPs of its products in one step, on one device, without recomputation.
        dtype: The type in which most of them are done.
    """

    layers: tuple[Size, Size]
    submesh: Submesh
    mesh: Annotated[Mesh, MADE]
    method: str
    forward: StageTime
    backward: StageTime
    recompute: StageTime
    gradients: StageTime
    update: StageTime
    weights_fraction: Amount
    send_bytes: Amount
    transfer_s: Amount
    state_bytes: Size
    activation_bytes: Size
    transient_bytes: Size
    peak_bytes: Size
    chunks: tuple[tuple[Size, Size], ...] = ()
    tensors: tuple[Tensor, ...] = ()
    flops: Amount = 0.0
    dtype: str = "bfloat16"

    @property
    def replica(self) -> Mesh:
        """The mesh of one replica: the axes behind the first."""
        cluster, sizes = self.mesh.cluster, self.mesh.sizes[1:]
        assert cluster is not None
        devices, per_host = prod(sizes), cluster.devices_per_host
        return cluster.part(max(devices // per_host, 1), min(devices, per_host)).mesh(sizes)

    @property
    def cost(self) -> StageTime:
        """One microbatch, forward and backward."""
        return self.forward + self.backward + self.recompute

    @property
    def memory(self) -> int:
        """Bytes of one device at the most: `peak_bytes`."""
        return self.peak_bytes

    @property
    def microbatch_s(self) -> float:
        """Seconds of one microbatch, forward and backward."""
        return self.cost.total_s

    @property
    def once_s(self) -> float:
        """Seconds that are spent once a step."""
        return self.gradients.total_s + self.update.total_s
