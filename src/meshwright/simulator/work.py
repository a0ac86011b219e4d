"""The work of a step in a neutral form: tasks on lanes for each stage, memory, and the pipeline's schedule.

A plan and a published recipe both become a `Work`; the engine knows no other input.
"""

from dataclasses import dataclass
from typing import NamedTuple

from meshwright.schedules.instructions import Instruction, instructions_in_a_row

COMPUTE, COLLECTIVE, TRANSFER = "compute", "collective", "transfer"

#: The lane on which gradients are exchanged: only the update waits for it, and barriers between layers.
GRADIENTS = "gradients"


class Task(NamedTuple):
    """A task of one device; all devices of its class do the same.

    Attributes:
        name: What it is, for people.
        kind: ``"compute"``, ``"collective"`` or ``"transfer"``.
        lane: Its queue: tasks of one lane run one after another, in order.
        seconds: Its time without contention.
        link: The link that it uses; tasks on the same link share its bandwidth. Empty for compute.
        needs: Indices, in its list, of the tasks that must be done before it may begin.
        num_bytes: Bytes that it sends; 0 for compute.
        live_bytes: Memory that is taken while it runs, where that is known task by task; else 0.
        collective: Of one collective of a plan, its kind and mesh axes.
    """

    name: str
    kind: str
    lane: str
    seconds: float
    link: str = ""
    needs: tuple[int, ...] = ()
    num_bytes: float = 0.0
    live_bytes: float = 0.0
    collective: tuple[str, tuple[str, ...]] = ("", ())


Tasks = tuple[Task, ...]
Lists = tuple[tuple[Instruction, ...], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One virtual stage: a run of layers of one stage, and its tasks for one microbatch.

    Attributes:
        forward: Its forward pass.
        backward: Its backward pass, recomputation included.
        closing: The last backward pass of a step, overlapped with the exchange of gradients.
        inputs, weights, closing_weights: The backward pass in two parts, for schedules that do the weights' gradients
            apart, and the last of them with that exchange.
        send_s: Time to send its result to the next virtual stage; the gradient comes back in the same time.
        send_bytes: Bytes of that transfer.
        activation_bytes: Bytes that one microbatch keeps from forward to backward.
        working_bytes: Bytes of temporaries while one microbatch is processed.
    """

    forward: Tasks
    backward: Tasks
    closing: Tasks
    inputs: Tasks = ()
    weights: Tasks = ()
    closing_weights: Tasks = ()
    send_s: float = 0.0
    send_bytes: float = 0.0
    activation_bytes: float = 0.0
    working_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """One training step on a cluster.

    Attributes:
        name: What it is, for people.
        chunks: The virtual stages; the one of stage s and chunk c is at c · num_stages + s.
        num_stages: Number of physical stages: the classes of devices.
        num_microbatches: Microbatches of a step.
        schedule: A schedule of `pipeline.schedules`; any where there is one stage.
        update: The tasks of each stage's update, which run once, after its gradients have arrived.
        state_bytes: Bytes that each stage keeps all the time: parameters, gradients, optimizer.
        devices: Number of devices of each stage.
        limit_bytes: Memory of one device of each stage.
        peak_flops: Matrix rate of one device; the mean of all where they differ.
        model_flops: FLOPs of one step that the model itself asks for, on all devices, without recomputation.
        tokens: Tokens of one step; of a model without tokens, its examples.
        counted: What they are called: tokens or examples.
        contention: How much slower compute runs while a collective is under way.
        fixed_s: Time of a step that no task explains.
        plays: The instructions of each stage, where a plan has them; else they follow from the schedule.
    """

    name: str
    chunks: tuple[Chunk, ...]
    num_stages: int
    num_microbatches: int
    schedule: str
    update: tuple[Tasks, ...]
    state_bytes: tuple[float, ...]
    devices: tuple[int, ...]
    limit_bytes: tuple[float, ...]
    peak_flops: float
    model_flops: float
    tokens: float
    contention: float = 0.0
    fixed_s: float = 0.0
    plays: Lists = ()
    counted: str = "tokens"

    @property
    def instructions(self) -> Lists:
        """What each stage does, in order; the runtime carries out the same list."""
        sizes = (self.num_stages, self.num_microbatches, self.interleave)
        return self.plays or instructions_in_a_row(self.schedule, *sizes)

    @property
    def interleave(self) -> int:
        return len(self.chunks) // self.num_stages

    def send_s(self, source: int, target: int) -> float:
        """Time to send between two neighbouring virtual stages; nothing where one stage holds both."""
        return self.chunks[min(source, target)].send_s if self.num_stages > 1 else 0.0

    @property
    def num_devices(self) -> int:
        return sum(self.devices)
