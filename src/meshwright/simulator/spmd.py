"""Makes the work of a plan that is one program over one mesh: its operations and collectives as tasks.

The purpose of a collective determines its dependencies. Reductions of gradients overlap the backward pass, and the
update waits for them; where the plan has barriers between layers, the second layer after them does. Copies of arguments
and of their casts (ZeRO-3's parameters) are prefetched during the operations before the one that reads them. Keys that
are passed around in a ring are sent while attention computes with those that are there. Every other collective blocks
the operation that needs it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshwright.cost.rates import Rates, cluster_rates
from meshwright.cost.sustained import link_of, sustained_s
from meshwright.errors import SimulationError
from meshwright.hardware import Chip, Mesh
from meshwright.plans.plan import Collective, OpPlan, PlanData
from meshwright.simulator.software import XLA, Software
from meshwright.simulator.work import COLLECTIVE, COMPUTE, GRADIENTS, Chunk, Task, Tasks, Work

_PHASES = ("forward", "backward", "update")

#: Purposes of what an operation waits for, and of what goes around while it computes.
_BEFORE = ("reshard", "halo", "exchange")
_RING = "ring"
#: Lanes whose small messages are combined with their neighbours'.
FETCH = "fetch"
_COMBINED = (FETCH, GRADIENTS)
_LOSS = "cross_entropy"  # in the label of an operation; frameworks fuse it even where they fuse nothing else

#: Part of a device's memory that holds arguments fetched ahead of the operations that read them. Halved or doubled, it
#: changes none of three ZeRO-3 steps on H100s and A100s, and one on V100s by 0.5%.
_AHEAD = 1 / 16


def spmd_work(plan: PlanData, mesh: Mesh, software: Software = XLA) -> Work:
    """The work of one step on a mesh, which need not be the plan's own."""
    assert mesh.cluster is not None
    if plan.ops and not any(op.load for op in plan.ops):
        raise SimulationError(
            "the plan does not say what its operations do, because an earlier Meshwright saved it; make it again"
        )
    cluster = mesh.cluster
    prices = cluster_rates(cluster)
    measured = _measured(plan, prices, software) if cluster == plan.mesh.cluster else 1.0
    phases = [_Phase(mesh, prices, software, measured).tasks(phase, plan) for phase in _PHASES]
    trains = bool(phases[1])
    state = float(sum(plan.memory.argument_bytes.values()))
    chunk = Chunk(
        forward=phases[0],
        backward=phases[1],
        closing=phases[1],
        working_bytes=max(0.0, plan.memory.peak_bytes - state),
    )
    return Work(
        name=f"{plan.method} on {mesh!r}",
        chunks=(chunk,),
        num_stages=1,
        num_microbatches=1,
        schedule="1f1b" if trains else "inference",
        update=(phases[2],),
        state_bytes=(state,),
        devices=(mesh.num_devices,),
        limit_bytes=(cluster.memory_bytes,),
        peak_flops=peak_flops(plan, cluster.chip),
        model_flops=model_flops(plan),
        tokens=num_tokens(plan),
        counted=counted(plan),
        contention=prices.constants.contention,
        fixed_s=0.0 if "profile" in plan.provenance else software.fixed_s,  # which a measured step has in it
    )


def _measured(plan: PlanData, prices: Rates, software: Software) -> float:
    """Measured ÷ modelled compute of a plan, by a profile of its step or by what is known of classes of operations."""
    if not {"profile", "calibration"} & set(plan.provenance):
        return 1.0
    loads = [op.load for op in plan.ops if op.load is not None]
    modelled = sum(load.trips * prices.load_s(load, software.attention) for load in loads)
    return plan.cost.compute / modelled if modelled else 1.0


def model_flops(plan: PlanData) -> float:
    """FLOPs of the model's products, without recomputation and without work that several devices repeat."""
    loads = [op.load for op in plan.ops if op.load is not None and not op.load.recomputed]
    return sum(load.flops * load.trips * (load.num_parts or plan.mesh.num_devices) for load in loads)


def num_tokens(plan: PlanData) -> float:
    """Tokens of a step: integers of the batch with a row and a position; rows where there are none."""
    batch, sequence = batch_and_sequence(plan)
    return float(batch * (1 if sequence is None else sequence))


def counted(plan: PlanData) -> str:
    """What a plan's throughput counts: ``tokens`` where its data have any, else ``examples``."""
    return "examples" if batch_and_sequence(plan)[1] is None else "tokens"


def batch_and_sequence(plan: PlanData) -> tuple[int, int | None]:
    """Rows of the batch (0 where the data has none), and tokens of each; None where there are no tokens."""
    data = [t for t in plan.arguments if t.role == "data" and t.shape]
    tokens = [t.shape for t in data if t.dtype.startswith(("int", "uint")) and len(t.shape) == 2]
    if tokens:
        batch, sequence = max(tokens, key=lambda shape: shape[0] * shape[1])
        return batch, sequence
    return max((t.shape[0] for t in data), default=0), None


def peak_flops(plan: PlanData, chip: Chip) -> float:
    """Matrix rate of the type in which most of the products are done."""
    done: dict[str, float] = {}
    for op in plan.ops:
        if op.load is not None and op.load.flops:
            done[op.load.dtype] = done.get(op.load.dtype, 0.0) + op.load.flops * op.load.trips
    return chip.peak_flops(max(done, key=lambda dtype: done[dtype]) if done else "bfloat16")


class _Phase:
    """The tasks of one phase, in the making."""

    def __init__(self, mesh: Mesh, prices: Rates, software: Software, measured: float):
        assert mesh.cluster is not None
        self.mesh = mesh
        self.prices = prices
        self.software = software
        self.measured = measured  # ÷ modelled compute
        self.ahead_bytes = mesh.cluster.memory_bytes * _AHEAD
        self.tasks_: list[Task] = []
        self.waits: list[int] = []  # tasks that the next operation waits for
        self.last: tuple[int, ...] = ()  # the last operation
        self.recent: list[int] = []  # reductions of gradients since the last barrier
        self.behind: list[int] = []  # those before it, which the next barrier waits for
        self.live = 0.0  # the most memory since then
        self.fetched: list[tuple[float, int]] = []  # bytes of each fetch; the operation before its reader

    def tasks(self, phase: str, plan: PlanData) -> Tasks:
        """All tasks of a phase, in program order."""
        around: dict[int, list[Collective]] = {}
        for item in plan.collectives:
            if item.phase == phase:
                around.setdefault(item.serial, []).append(item)
        for item in around.pop(-1, ()):
            self._in_the_way(item)
        ops = [op for op in plan.ops if op.phase == phase]
        barriers = sorted({op.serial + op.barrier for op in ops if op.barrier})
        for op in ops:
            while barriers and barriers[0] <= op.serial:
                barriers.pop(0)
                self.waits, self.behind, self.recent = [*self.waits, *self.behind], self.recent, []
            mine = around.pop(op.serial, [])
            self._before(item for item in mine if item.purpose in _BEFORE)
            ring = [place for item in mine if item.purpose == _RING for place in self._add(item, _RING, self.waits)]
            self._compute(op)
            self.waits += ring
            self._after(item for item in mine if item.purpose not in (*_BEFORE, _RING))
        for items in around.values():  # of results that are resharded for the caller
            self._after(items)
        return tuple(self.tasks_)

    def _before(self, items: Iterable[Collective]) -> None:
        for item in items:
            if item.argument and self.software.overlap:
                self._fetch(item)
            else:
                self._in_the_way(item)

    def _fetch(self, item: Collective) -> None:
        """Fetches an argument while earlier operations run, as early as the memory set aside for that allows."""
        size, needs = item.bytes, tuple[int, ...]()
        for num_bytes, reader in reversed(self.fetched):
            size += num_bytes
            if size > self.ahead_bytes:
                needs = (reader,) if reader >= 0 else ()
                break
        self.waits += self._add(item, FETCH, needs)
        self.fetched.append((item.bytes, self.last[0] if self.last else -1))

    def _after(self, items: Iterable[Collective]) -> None:
        for item in items:
            if item.purpose == "gradient":
                self._gradient(item)
            else:
                self._in_the_way(item)

    def _gradient(self, item: Collective) -> None:
        places = self._add(replace(item, bytes=item.bytes * self.software.gradients), GRADIENTS, self.last)
        if not self.software.overlap:
            self.waits += places
        self.recent += places

    def _compute(self, op: OpPlan) -> None:
        self.live = max(self.live, float(op.live_bytes))
        if op.load is None:
            return
        seconds = self.measured * op.load.trips * self.prices.load_s(op.load, self.software.attention)
        if not op.load.flops and op.phase != _PHASES[-1] and _LOSS not in op.label:
            seconds *= self.software.separate
        self.tasks_.append(Task(op.label, COMPUTE, "compute", seconds, "", tuple(self.waits), 0.0, self.live))
        self.live = 0.0
        self.waits, self.last = [], (len(self.tasks_) - 1,)

    def _in_the_way(self, item: Collective) -> None:
        self.waits = self._add(item, "collective", (*self.last, *self.waits))

    def _add(self, item: Collective, lane: str, needs: Sequence[int]) -> list[int]:
        axes = tuple(self.mesh.names.index(name) for name in item.axes)
        combines = lane in _COMBINED or item.phase == _PHASES[-1]  # norms for clipping, for one, do not wait in turn
        combined = max(item.bytes, self.software.message_bytes) if combines else item.bytes
        whole_s = sustained_s(self.mesh, item.kind, axes, combined, self.prices.constants.network)
        seconds = item.trips * whole_s * item.bytes / combined if combined else 0.0
        name = f"{item.kind} {'+'.join(item.axes)} for {item.operation}"
        link = link_of(self.mesh, axes)
        sent, what = item.bytes * item.trips, (item.kind, item.axes)
        self.tasks_.append(Task(name, COLLECTIVE, lane, seconds, link, tuple(needs), sent, collective=what))
        return [len(self.tasks_) - 1]
