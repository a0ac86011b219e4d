"""The parts of a plan that are measured by themselves: its segments under the shardings they have, and what is left.

Occurrences of a segment that the plan splits alike are one part, which is measured once.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from meshwright.blocks.blocks import Blocks
from meshwright.blocks.find import blocks_of
from meshwright.blocks.fingerprint import fingerprint
from meshwright.cost.rates import cluster_rates
from meshwright.graph import UPDATE, Graph
from meshwright.hardware import Cluster, Mesh
from meshwright.planner.pricing.corrections import SHARES, CorrectedTimes
from meshwright.planner.reading.details import FreshDetails
from meshwright.plans.plan import Collective, OpPlan, PlanData
from meshwright.plans.tensor import Spec, spec_text

REST = "rest"  # begins the fingerprint of a part that belongs to no segment
STEP = "step"  # begins the fingerprint of a whole step


@dataclass(frozen=True)
class MeasuredPart:
    """Some operations of a plan that run together, as often as the plan has them.

    Attributes:
        fingerprint: The segment's, or one that begins with `REST`.
        shardings: The strategies of the operations and of what they read, as text; equal parts take equal time.
        operations: Indices in the graph of one occurrence, in program order.
        occurrences: The indices of all occurrences.
        trips: How often each occurrence runs in one step.
        modelled_s: Modelled compute of one run, on a device that works alone, as it is measured.
        sent_s: Modelled time of the collectives of one run, of their start and of their bytes by kind.
        stand_in_s: Modelled time of the stand-ins of its collectives, of one run.
        flops: FLOPs of products and convolutions of one run, on one device.
        label: The name of its largest operation.
        dtype: The type of that operation's operands.
    """

    fingerprint: str
    shardings: str
    operations: tuple[int, ...]
    occurrences: tuple[tuple[int, ...], ...]
    trips: float
    modelled_s: float
    sent_s: Mapping[tuple[str, str], float]
    stand_in_s: float
    flops: float
    label: str
    dtype: str

    @property
    def count(self) -> float:
        """How often it runs in one step."""
        return len(self.occurrences) * self.trips

    @property
    def communication_s(self) -> float:
        """Modelled communication of one run."""
        return sum(self.sent_s.values())

    @property
    def is_segment(self) -> bool:
        return not self.fingerprint.startswith((REST, STEP))


def parts_of(plan: PlanData, graph: Graph, blocks: Blocks | None = None) -> tuple[MeasuredPart, ...]:
    """The parts of a plan, given its traced program."""
    blocks = blocks_of(graph) if blocks is None else blocks
    reader = _Reader(plan, graph)
    found: list[MeasuredPart] = []
    left = set(range(len(graph.ops)))
    for segment in blocks.segments:
        alike: dict[str, list[tuple[int, ...]]] = {}
        for occurrence, numbers in zip(segment.occurrences, segment.block_numbers, strict=True):
            own = {*occurrence, *(i for number in numbers for i in blocks.blocks[number].updates)}
            operations = tuple(i for i in sorted(own & left) if graph.ops[i].trips == segment.trips)
            left -= set(operations)
            alike.setdefault(reader.shardings(operations), []).append(operations)
        found += [reader.part(segment.fingerprint, text, laps, segment.trips) for text, laps in alike.items()]
    bodies: dict[tuple[int, float], list[int]] = {}
    for index in sorted(left):
        bodies.setdefault((int(graph.body[index]), graph.ops[index].trips), []).append(index)
    for (_, trips), rest in bodies.items():
        if any(graph.ops[i].serial in reader.ops for i in rest):
            text = reader.shardings(rest, everything=True)
            found.append(reader.part(f"{REST}-{fingerprint(graph, rest, ())}", text, [tuple(rest)], trips))
    return tuple(found)


def program_of(graph: Graph) -> str:
    """The fingerprint of a whole step, however it is split."""
    return f"{STEP}-{fingerprint(graph, tuple(range(len(graph.ops))), ())}"


def step_of(plan: PlanData, graph: Graph) -> MeasuredPart:
    """The whole step as one part; loops run inside it."""
    everything = tuple(range(len(graph.ops)))
    plans = {op.serial: op for op in plan.ops}
    largest = max(plan.ops, key=lambda op: op.load.flops if op.load else 0.0, default=None)
    splits = (f"{op.trips:g} {_split(plans[op.serial]) if op.serial in plans else ''}" for op in graph.ops)
    axes = " ".join(f"{name}={size}" for name, size in plan.mesh.shape.items())
    donated = "".join("d" if t.donated else "-" for t in plan.arguments)
    return MeasuredPart(
        program_of(graph),
        f"{axes}; {_digest(chr(10).join((axes, donated, *splits)))}",
        everything,
        (everything,),
        1.0,
        plan.cost.compute,
        modelled_communication(plan, plan.collectives),
        sum(stand_in_s(plan.mesh, item) for item in plan.collectives),
        plan.flops,
        "the whole step",
        "" if largest is None or largest.load is None else largest.load.dtype,
    )


class _Reader:
    """Reads the strategies and the modelled work of operations from a plan."""

    def __init__(self, plan: PlanData, graph: Graph):
        self.graph, self.plan = graph, plan
        self.ops: dict[int, OpPlan] = {op.serial: op for op in plan.ops}
        self.sent: dict[int, list[Collective]] = {}
        for item in plan.collectives:
            self.sent.setdefault(item.serial, []).append(item)

    def shardings(self, operations: Iterable[int], everything: bool = False) -> str:
        """The splits of products in words, and a digest of what takes time: products, reductions and updates with their
        shapes and splits, and collectives with their bytes.

        Other operations follow these; at the borders of a segment they differ between occurrences. The collectives
        tell apart in which shardings a part gets its arguments and what others make, and the updates which optimizer
        it has: a segment's fingerprint does not cover these.

        Args:
            operations: The operations.
            everything: Whether all of them count, where they are no segment.
        """
        products, lines = [], []
        for index in operations:
            op = self.graph.ops[index]
            plan = self.ops.get(op.serial)
            lines += [f"{item.kind} {' '.join(item.axes)} {item.bytes:g}" for item in self.sent.get(op.serial, ())]
            if plan is None or plan.load is None:
                continue
            if plan.load.flops:
                products.append(f"{op.primitive} {_split(plan)}")
            if everything or plan.load.flops or op.primitive.startswith("reduce") or op.phase == UPDATE:
                kinds = [f"{k.dtype}{list(k.shape)}" for k in (*op.signature.operands, *op.signature.results)]
                lines.append(f"{op.primitive} {' '.join(kinds)} {_split(plan)}")
        axes = " ".join(f"{name}={size}" for name, size in self.plan.mesh.shape.items())
        return f"{axes}; {'; '.join(products)}; {_digest(chr(10).join((axes, *sorted(lines))))}"

    def part(self, fingerprint: str, text: str, laps: Sequence[tuple[int, ...]], trips: float) -> MeasuredPart:
        middle = laps[len(laps) // 2]
        plans = [self.ops[s] for s in (self.graph.ops[i].serial for i in middle) if s in self.ops]
        largest = max(plans, key=lambda op: op.load.flops if op.load else 0.0, default=None)
        sent = [item for op in plans for item in self.sent.get(op.serial, ())]
        sent_s = {kind: seconds / max(trips, 1.0) for kind, seconds in modelled_communication(self.plan, sent).items()}
        stand_ins = sum(stand_in_s(self.plan.mesh, item) for item in sent) / max(trips, 1.0)
        flops = sum(op.load.flops for op in plans if op.load)
        dtype = largest.load.dtype if largest is not None and largest.load is not None else ""
        label = "" if largest is None else largest.label
        seconds = modelled_s(self.plan.mesh.cluster, plans)
        return MeasuredPart(
            fingerprint, text, middle, tuple(laps), trips, seconds, sent_s, stand_ins, flops, label, dtype
        )


def modelled_communication(plan: PlanData, items: Iterable[Collective]) -> dict[tuple[str, str], float]:
    """Modelled time of collectives, of their start and of their bytes by kind, without corrections by measurements."""
    details, names, found = plan.details, plan.mesh.names, dict[tuple[str, str], float]()
    factors = details.back.formulation.pricer.times.factors if isinstance(details, FreshDetails) else {}
    times = CorrectedTimes(plan.mesh, factors)
    for item in items:
        axes = [names.index(axis) for axis in item.axes]
        once_s = item.seconds / item.trips if item.trips else 0.0
        for share, seconds in zip(SHARES, times.divided(item.kind, axes, item.bytes, once_s), strict=True):
            found[item.kind, share] = found.get((item.kind, share), 0.0) + item.trips * seconds
    return found


def stand_in_s(mesh: Mesh, item: Collective) -> float:
    """Modelled time of a collective's stand-ins in one step: how long the chip takes to read and write its bytes."""
    count = prod(mesh.shape[axis] for axis in item.axes)
    moved = {  # by the convention of `Mesh.collective_s`, those of gathers and exchanges are of the whole group
        "all_gather": item.bytes * (1 + 1 / count),
        "all_to_all": 2 * item.bytes / count,
        "reduce_scatter": 2 * item.bytes / count,
    }.get(item.kind, 0.0)
    return 0.0 if mesh.chip is None else float(item.trips * mesh.chip.memory_s(moved))


def modelled_s(cluster: Cluster | None, ops: Iterable[OpPlan]) -> float:
    """Modelled compute of one trip of some operations on a device that works alone, as it is measured."""
    if cluster is None:
        return 0.0
    rates = cluster_rates(cluster, 1)
    return sum(rates.load_s(op.load) for op in ops if op.load is not None)


def _split(op: OpPlan) -> str:
    def side(specs: Sequence[Spec | None]) -> str:
        return ",".join(map(spec_text, specs))

    return f"{side(op.operands)}>{side(op.partial)}>{side(op.results)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
