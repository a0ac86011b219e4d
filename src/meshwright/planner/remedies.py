"""Suggests remedies if no plan fits: even splits, microbatches, checkpointing, and about how much each would need.

The estimates start from the choice that needs least memory, and from the roles of the values live at its peak. They are
rough: a plan for the changed function may choose otherwise.
"""

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Ints
from meshwright.graph.phases import FORWARD, PHASES
from meshwright.planner.grouping.folding import laps
from meshwright.planner.grouping.roles import find_roles
from meshwright.planner.pricing.formulation import Exposure
from meshwright.planner.reading.readback import MeshProblem, Readback
from meshwright.solver.problem.gap import relative_gap
from meshwright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from meshwright.planner.solving.fit_memory import ViewState

_WIDE = 0.2  # gap above which a plan says what keeps it from being better
_REMADE = ("checkpoint", "remat")  # in the name scopes of recomputed operations


def remedies(
    formulation: MeshProblem, choice: Ints, needed: int, limit: float, scale: float
) -> tuple[str, tuple[int, int] | None]:
    """Sentences on the remedies that would help, and what microbatches would do (see `DoesNotFit`).

    Args:
        formulation: The problem of the mesh that needs least.
        choice: The choice that needs least.
        needed: The bytes it needs.
        limit: The bytes allowed.
        scale: How many bytes are needed for each that is modelled, by which what is told is multiplied.
    """
    found = _Fullest(formulation, choice, scale)
    told = [*found.uneven(needed, limit), *found.microbatches(needed, limit), *found.checkpointed(needed)]
    rest = "use more devices, a smaller batch, or devices with more memory."
    cut = found.cut(needed, limit)
    scaled = None if cut is None else (cut[0], int(scale * cut[1]))
    return " ".join([*told, f"Or {rest}" if told else rest.capitalize()]), scaled


def what_holds(state: "ViewState", cost: float, bound: float, is_over: bool, scale: float) -> list[str]:
    """A remark on a plan that may be much slower than the best: what keeps it from being better, and what to do.

    Args:
        state: The view of the plan, with its choice.
        cost: What the plan costs, all of its communication counted.
        bound: What no plan costs less than on this mesh.
        is_over: Whether the time of the search was over.
        scale: As in `remedies`.
    """
    gap, limit, free = relative_gap(cost, bound), state.view.limit, state.free
    if not _WIDE < gap < np.inf:
        return []
    formulation = state.formulation
    causes: list[str] = []
    help_by: list[str] = []
    if limit is not None and free is not None and free.choice is not None and free.peak_usage > limit:
        needed = int(free.peak_usage)
        told, allowed = format_bytes(scale * needed), format_bytes(scale * limit)
        quicker = Readback(formulation.whole, free.choice)
        seconds = format_seconds(quicker.compute() + quicker.communication())
        causes.append(f"the memory limit binds (a plan of {seconds} would need {told} on each device, of {allowed})")
        help_by += _Fullest(formulation, free.choice, scale).microbatches(needed, limit)
    if is_over:
        causes.append("the time of the search was over")
        help_by.append("A longer search may find a better plan: give method=mw.Auto(seconds=…) more seconds.")
    if state.formulation.exposure != Exposure():
        causes.append("its lower bound counts only the communication that compute waits for")
    why = " and ".join(causes) or "its lower bound is loose, for layers are tied or sums of memory come in lumps"
    sizes = "×".join(map(str, formulation.mesh.sizes))
    return [" ".join([f"This plan may cost {gap:.0%} more than the best on mesh {sizes}: {why}.", *help_by])]


class _Fullest:
    """The moment of a choice's peak memory, in modelled bytes; those that are told are scaled."""

    def __init__(self, formulation: MeshProblem, choice: Ints, scale: float):
        self.formulation, self.choice, self.scale = formulation, choice, scale
        self.graph, self.mesh = formulation.grouping.graph, formulation.mesh
        self.roles = find_roles(self.graph)
        memory = formulation.memory
        made = formulation.copies_made(choice)
        at = memory.profile(choice, made).peak_at
        chosen = np.array([size[choice[c]] for c, size in zip(memory.column_class, memory.column_bytes, strict=True)])
        live = (memory.start <= at) & (at < memory.stop)
        self.size, self.group = memory.share[live] * chosen[memory.column[live]], memory.group[live]  # of live columns
        role = np.array(memory.roles)[memory.column[live]]
        self.is_passing = np.isin(role, ("activations", "temporaries"))
        self.held = {name: float(self.size[role == name].sum()) for name in set(memory.roles)}
        self.held["copies"] = float(np.cumsum(made.change(memory.num_steps))[at])
        # The bytes that grow with the rows of the batch, and the bytes that do not depend on them.
        self.passing = float(self.size[self.is_passing].sum())
        self.staying = sum(self.held.get(name, 0.0) for name in ("parameters", "optimizer", "data", "copies"))

    def uneven(self, needed: int, limit: float) -> Iterator[str]:
        """Names the tensors that cannot be split evenly over the devices, if the plan would fit otherwise."""
        axes, graph, whole = self.formulation.axes, self.graph, self.formulation.restrictions.whole
        lost, stuck, weights = 0.0, [], frozenset(self.roles.parameters)
        for value, path in zip(graph.inputs, graph.input_paths, strict=True):
            kind = graph.types[value]
            parts = int(axes.num_parts(axes.legal_codes(kind.shape)).max())
            if value not in whole and kind.shape and parts < self.mesh.num_devices:
                # The gradient of a parameter has the sharding of the parameter.
                lost += (1 + (value in weights)) * (kind.num_bytes / parts - kind.num_bytes / self.mesh.num_devices)
                stuck.append((kind.num_bytes / parts, path, kind.shape))
        if not lost or needed - lost > limit:
            return
        _, path, shape = max(stuck)
        largest = f"{path} ({'×'.join(map(str, shape))})"
        sizes = " and ".join(str(size) for size in self.mesh.sizes if size > 1)
        more = f" and {len(stuck) - 1} other arguments" if len(stuck) > 1 else ""
        enough = format_bytes(self.scale * (needed - lost))
        yield (
            f"The cause: {self.mesh.num_devices} devices cannot share {largest}{more} evenly, "
            f"since {sizes} do{'' if ' and ' in sizes else 'es'} not divide {'their' if more else 'its'} dims; split "
            f"evenly, about {enough} would suffice: choose another mesh or number of devices."
        )

    def microbatches(self, needed: int, limit: float) -> Iterator[str]:
        """The fewest microbatches with which the plan fits; or a sentence that no number suffices."""
        if found := self.cut(needed, limit):
            count, size = found
            needs = f"With microbatches={count} it would need about {format_bytes(self.scale * size)}."
            yield needs if size <= limit else f"Even w{needs[1:]}"

    def cut(self, needed: int, limit: float) -> tuple[int, int] | None:
        """See `DoesNotFit.microbatches`."""
        rows, already = self._rows_on_device(), self.graph.microbatches
        counts = [2**n for n in range(1, rows.bit_length()) if rows % 2**n == 0]
        held = self.held.get
        gradients = held("gradients", 0.0)
        if already == 1:  # all of them will be accumulated
            gradients = max(gradients, held("parameters", 0.0))
        sizes = [(already * count, int(self.staying + gradients + self.passing / count)) for count in counts]
        enough = [(count, size) for count, size in sizes if size <= limit]
        found = enough[0] if enough else sizes[-1] if sizes else None
        return found if found is not None and found[1] < needed else None

    def _rows_on_device(self) -> int:
        """Rows of the batch on one device; 1 if there is no batch."""
        best = 1
        for value in self.roles.data:
            shape = self.graph.types[value].shape
            home = int(self.formulation.grouping.placed.home[value])
            if shape and home >= 0:
                which = self.formulation.folded.group_class[home]
                code = self.formulation.tables[which].codes[0][self.choice[which]]
                split = prod(self.mesh.sizes[a] for a in self.formulation.axes.dims(int(code), len(shape))[0])
                best = max(best, shape[0] // split)
        return max(best // self.graph.microbatches, 1)

    def checkpointed(self, needed: int) -> Iterator[str]:
        """The memory needed if each layer is recomputed: its input is kept, and one layer at a time is there.

        That is the fullest moment as it is without the layers' insides, or that of a layer with its gradients.
        """
        if any(word in scope for scope in self.graph.columns.scopes for word in _REMADE):
            return
        count, crossing, inside = self._layers()
        one = float(self.size[self.is_passing & inside[self.group]].sum()) / count
        gradients = max(self.held.get("gradients", 0.0), self.held.get("parameters", 0.0))
        size = count * crossing + max(needed - count * one, self.staying + gradients + 2 * one)
        if count > 1 and size < needed:
            told = format_bytes(self.scale * size)
            yield f"With jax.checkpoint around each layer it would need about {told}."  # those at the ends may differ
        elif self.graph.loops:
            yield "With jax.checkpoint around the body of the loop over its layers it would need less."

    def _layers(self) -> tuple[int, float, NDArray[np.bool_]]:
        """The number of layers that repeat, the bytes that a device hands from one to the next, and their groups."""
        grouping, formulation = self.formulation.grouping, self.formulation
        run, lap = laps(grouping, formulation.folded)
        leader, phase = grouping.placed.leader, self.graph.columns.phase
        is_forward = (leader >= 0) & (run >= 0)
        is_forward[is_forward] = phase[leader[is_forward]] == PHASES.index(FORWARD)
        if not is_forward.any():
            return 1, 0.0, is_forward
        longest = int(np.bincount(run[is_forward]).argmax())
        inside = is_forward & (run == longest)
        slots, home = grouping.slots, grouping.placed.home
        reader = np.repeat(np.arange(len(slots.start) - 1), np.diff(slots.start))
        source = home[slots.value]
        handed = (source >= 0) & inside[reader] & inside[source] & (lap[reader] == 1) & (lap[source] == 0)
        crossing = 0.0
        for value in np.unique(slots.value[handed]).tolist():
            which, place = formulation.folded.group_class[int(home[value])], int(grouping.values.rank[value])
            code = formulation.tables[which].codes[place][self.choice[which]]
            crossing += self.graph.types[value].num_bytes / int(formulation.axes.num_parts(np.array([code]))[0])
        return int(lap[inside].max()) + 1, crossing, inside
