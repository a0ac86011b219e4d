"""The long lists of a plan: every collective, and the split and the work of every operation."""

from dataclasses import dataclass

from meshwright.cost.load import Load
from meshwright.plans.tensor import Spec
from meshwright.schema import Amount, Place, Size


@dataclass(frozen=True, slots=True)
class Collective:
    """One communication of the plan.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or permute.
        axes: Names of the mesh axes it runs over.
        bytes: Bytes by the convention of `Mesh.collective_s`, of one trip.
        seconds: Time of all trips together; of what goes around in a ring, the part that its operation waits for.
        phase: forward, backward or update.
        operation: The operation that makes or needs the value.
        source: The user's source line of that operation.
        purpose: gradient, activation, halo, reshard, exchange (of early and late tokens) or ring.
        trips: How often it runs in one step.
        serial: That operation's place in the traced program; -1 where there is none.
        argument: Whether it moves an argument, or a cast of one, which is available from the start.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: Amount
    seconds: Amount
    phase: str
    operation: str
    source: str
    purpose: str
    trips: Amount = 1.0
    serial: Place = -1
    argument: bool = False


@dataclass(frozen=True, slots=True)
class OpPlan:
    """How one operation is split.

    Attributes:
        serial: The operation's place in the traced program.
        label: Its scopes and primitive.
        phase: forward, backward or update.
        operands: Sharding in which each operand is needed; None for scalars.
        partial: Sharding of each result before partial sums are reduced; None for scalars.
        results: Sharding of each result.
        via: Sharding of the copy that each operand is taken from, where several operations share one; else None. For a
            virtual operand, that of the value it is made from.
        sums: Axes over which its first result is partial.
        waits: Axes over which its result is left partial, because a loop adds it up first.
        live_bytes: Memory of one device that is taken while it runs.
        load: Its work on one device; None where there is none.
        barrier: How many places after its own its result passes a barrier, together with others; 0 for none.
    """

    serial: Size
    label: str
    phase: str
    operands: tuple[Spec | None, ...]
    partial: tuple[Spec | None, ...]
    results: tuple[Spec | None, ...]
    via: tuple[Spec | None, ...]
    sums: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    live_bytes: Size = 0
    load: Load | None = None
    barrier: Size = 0
