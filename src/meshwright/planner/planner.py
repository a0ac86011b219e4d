"""Plans a function: trace, group, fold, then formulate and solve on each mesh view, and read the best choice back."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

import meshwright
from meshwright.cost.xla_gpu.kernels import dense_remarks
from meshwright.cost.xla_gpu.liveness import liveness, plain_liveness
from meshwright.errors import TraceError
from meshwright.fallback import with_fallback
from meshwright.graph import Traced
from meshwright.graph.low_precision import slow_remarks
from meshwright.graph.remarks import carried_remarks
from meshwright.hardware import Mesh
from meshwright.planner.budget import Budget
from meshwright.planner.grouping.folding import Folded, fold
from meshwright.planner.grouping.groups import Grouping
from meshwright.planner.grouping.roles import find_roles
from meshwright.planner.kernel_remarks import attention_remarks, foreign_remarks, kernel_remarks, unsplittable
from meshwright.planner.methods import Auto, Method
from meshwright.planner.pricing.corrections import Corrections
from meshwright.planner.pricing.formulation import Exposure
from meshwright.planner.pricing.pricer import Pricer
from meshwright.planner.pricing.user_shardings import call_remarks, differing, meshes_as_written
from meshwright.planner.reading.details import FreshDetails
from meshwright.planner.reading.readback import MeshProblem, Readback
from meshwright.planner.remedies import what_holds
from meshwright.planner.solving.fit_memory import ViewState
from meshwright.planner.solving.named_starts import restricted
from meshwright.planner.solving.refining import proven
from meshwright.planner.solving.view_search import Findings, ViewSearch, search
from meshwright.planner.splitting import uneven_batch, uneven_state
from meshwright.plans.loops import loops_in
from meshwright.plans.plan import Considered, Cost, Memory, PlanData, SolutionSummary
from meshwright.plans.tensor import KEPT, Spec, Tensor
from meshwright.strategy.sharding import Axes

Progress = Callable[[str], None]
Lie = tuple[tuple[int, ...], str, Spec]  # shape, dtype and sharding


def program_task(
    traced: Traced, meshes: list[Mesh], method: Method, corrections: Corrections | None = None
) -> "tuple[Task, list[Mesh]]":
    """What is to be planned as one program, and the meshes to try; compute is corrected as was measured."""
    meshes = meshes_as_written(traced.graph, meshes)
    if meshes[0].is_cpu:
        traced = replace(traced, graph=traced.graph.for_cpu())
    return Task(traced, method, corrections=corrections, num_devices=meshes[0].num_devices, remarks=[]), meshes


def plan_program(
    traced: Traced,
    meshes: list[Mesh],
    method: Method,
    say: Progress,
    budget: Budget,
    corrections: Corrections | None = None,
) -> PlanData:
    """The best plan of one program over a whole mesh, on any of some meshes, by the sum of its costs."""
    task, meshes = program_task(traced, meshes, method, corrections)
    return task.plan(meshes, say, budget)


class Task:
    """A traced function and a method: all that does not depend on the mesh."""

    def __init__(
        self,
        traced: Traced,
        method: Method,
        folding: bool = True,
        corrections: Corrections | None = None,
        num_devices: int | None = None,
        barriers: bool = True,
        remarks: list[str] | None = None,
    ):
        """Groups and folds; a model that fails is an error, unless there is a list of remarks to say so in.

        On accelerators the program has barriers between its layers, unless they are turned off to compare.
        """
        self.traced = traced
        self.corrections = corrections
        self.method = method
        self.graph = traced.graph
        self.remarks = remarks
        self.grouping = Grouping(self.graph)
        if not len(self.grouping.placed.leader):
            name = getattr(traced.function, "__name__", repr(traced.function))
            raise TraceError(f"{name} neither takes arrays nor computes any: there is nothing to split; give it arrays")
        self.roles = find_roles(self.graph)
        self.live = with_fallback(
            remarks,
            "The model of fusion",
            "every value counts as stored",
            lambda: liveness(self.graph, self.grouping.nests, num_devices, barriers and not self.graph.on_cpu),
            lambda: plain_liveness(self.graph),
        )
        self.folding = folding
        self._foldings: dict[frozenset[tuple[int, Hashable]], Folded] = {}  # by the marks of methods
        self._pricers: dict[Mesh, Pricer] = {}
        self.folded = self._fold()
        self._problems: dict[Mesh, MeshProblem] = {}
        self._bounds: dict[Mesh, float] = {}  # by the full price of communication
        self._is_limited = True

    def unlimited(self) -> "Task":
        """The same with as much memory as it takes."""
        task = copy(self)
        task._is_limited, task._bounds = False, {}
        return task

    def by(self, method: Method) -> "Task":
        """The same function, to be planned by another method: all that does not depend on it is shared."""
        task = copy(self)
        task.method, task._problems, task._bounds = method, {}, {}
        task.folded = task._fold()
        task.remarks = None if self.remarks is None else [*self.remarks]
        return task

    def _fold(self) -> Folded:
        """The groups tied into classes, as the method's marks allow."""
        pins = self.method.pins(self.graph, self.roles)
        marks = frozenset(pins.items())
        if marks not in self._foldings:
            self._foldings[marks] = fold(self.grouping, pins, self.live.traffic, self.folding)
        return self._foldings[marks]

    def formulate(self, mesh: Mesh, exposure: Exposure | None = None) -> MeshProblem:
        """The choice problem on one mesh, with communication priced at the part of its time that is not hidden."""
        if mesh not in self._problems:
            axes = Axes(mesh.sizes)
            restrictions = self.method.restrict(self.graph, self.roles, mesh, axes)
            if mesh not in self._pricers:
                self._pricers[mesh] = Pricer(self.grouping, self.live.traffic, mesh, corrections=self.corrections)
            self._problems[mesh] = MeshProblem(self._pricers[mesh], self.folded, self.live, restrictions)
        whole = self._problems[mesh]
        return whole if exposure is None else whole.exposed(exposure)

    def limit(self, mesh: Mesh) -> float | None:
        """Bytes that the plan may use on each device."""
        if mesh.memory_bytes is None or not self._is_limited:
            return None
        return mesh.memory_bytes * (1.0 if mesh.is_abstract else self.method.memory_fraction) / self._bytes_factor

    @property
    def _bytes_factor(self) -> float:
        """What a step takes for each modelled byte, as it was measured; the model is solved under a limit to match."""
        return 1.0 if self.corrections is None else self.corrections.memory

    def plan(
        self, meshes: list[Mesh], say: Progress, budget: Budget | None = None, exposure: Exposure | None = None
    ) -> PlanData:
        """Solves on the meshes and makes the plan of the best; communication counts where it is not hidden.

        The plan's own costs are those of all communication.

        Raises:
            DoesNotFit: Nothing fits on any mesh.
            ShardingError: What the method fixes is impossible on every mesh.
        """
        findings = Findings()
        found = self._plan(meshes, say, budget or Budget(self.method.seconds), exposure, findings)
        if found is None:
            raise findings.error(self._bytes_factor)
        return found

    def plan_if_any(self, meshes: list[Mesh], budget: Budget) -> PlanData | None:
        """The plan; None where there is none, without seeking the least memory for which there would be one."""
        return self._plan(meshes, lambda _: None, budget, None, Findings())

    def _plan(
        self, meshes: list[Mesh], say: Progress, budget: Budget, exposure: Exposure | None, findings: Findings
    ) -> PlanData | None:
        formulate = cache(lambda mesh: self.formulate(mesh, exposure))
        found = search(
            meshes,
            ViewSearch(formulate, self.limit, self.floor_bytes, self.named, self.method.refined, say),
            budget,
            findings,
        )
        if found is None:
            return None
        say("reading the plan back")
        return self._read_back(*found, budget)

    def named(self, method: Method, problem: MeshProblem) -> MeshProblem | None:
        """A problem as a named method restricts it, where this task's method is free to do what that does."""
        return restricted(method, problem, self.graph, self.roles) if isinstance(self.method, Auto) else None

    def floor_bytes(self, mesh: Mesh) -> float:
        """Bytes of the arguments if every one of them is split as far as the mesh allows."""
        axes = Axes(mesh.sizes)
        counts = Counter(self.graph.kind[list(self.graph.inputs)].tolist())
        kinds = [(self.graph.kinds[number], n) for number, n in counts.items()]
        return float(sum(n * kind.num_bytes / axes.num_parts(axes.legal_codes(kind.shape)).max() for kind, n in kinds))

    def can_fit(self, mesh: Mesh) -> bool:
        """Whether some choice may fit the memory, as far as that is known before the problem is formulated.

        At the moment of peak memory, the devices together hold every live value at least once.
        """
        limit = self.limit(mesh)
        if limit is None:
            return True
        return self.live_bytes <= limit * mesh.num_devices

    @property
    def argument_bytes(self) -> float:
        """Bytes of the arguments."""
        return float(self.graph.num_bytes[list(self.graph.inputs)].sum())

    @property
    def live_bytes(self) -> float:
        """Bytes of all values that are live at once, at the most."""
        live, graph = self.live, self.graph
        values = np.flatnonzero(live.stored & (live.stop > live.start) & (self.grouping.placed.home >= 0))
        size = graph.num_bytes[values]
        taken, freed = (np.bincount(at[values], size, live.num_steps + 1) for at in (live.start, live.stop))
        return float(np.cumsum(taken - freed).max(initial=0.0))

    def _read_back(self, tied: ViewState, considered: list[Considered], budget: Budget) -> PlanData:
        assert tied.latest is not None
        was_over, limit = budget.is_over, self.limit(tied.formulation.mesh)
        solved, bound = with_fallback(
            self.remarks,
            "The lower bound",
            "the gap between the plan and the best plan is not known",
            lambda: proven(tied, limit, budget),
            lambda: (tied, 0.0),
        )
        assert solved.latest is not None and solved.latest.choice is not None
        choice, free = solved.latest.choice, solved.free
        back = Readback(solved.formulation.whole, choice, None if free is None else free.choice)
        profile, factor = back.profile(), self._bytes_factor
        peak_bytes = round(profile.peak_bytes * factor)
        cost = Cost(back.compute(), back.communication())
        mesh = solved.formulation.mesh
        # A problem in which communication costs less than its full price has a loose bound on what a plan costs.
        bound = max(bound, self._bounds.get(mesh, 0.0))
        if solved.formulation.exposure == Exposure():
            self._bounds[mesh] = bound
        call = self.traced.call
        return PlanData(
            mesh=mesh,
            method=self.method.name,
            cost=cost,
            flops=back.flops(),
            memory=Memory(
                peak_bytes,
                None if limit is None else round(limit * factor),
                self._argument_bytes(back),
                self.graph.ops[profile.peak_at].label if self.graph.ops else "",
                self._host_bytes(back),
            ),
            solution=SolutionSummary.proven(cost.total, bound, solved.seconds, tied.latest.status.value),
            arguments=tuple(self._arguments(back)),
            results=tuple(self._results(back)),
            details=FreshDetails(back, call.program),
            unsplittable=unsplittable(self.graph),
            considered=tuple(
                replace(one, cost=cost.total, peak_bytes=peak_bytes, rounds=solved.rounds)
                if one.shape == mesh.sizes
                else one
                for one in considered
            ),
            provenance=provenance(
                self.traced, mesh, factor, "" if self.corrections is None else self.corrections.about
            ),
            microbatches=self.graph.microbatches,
            batch_argnums=self.graph.batch_argnums,
            recompute=self.graph.recompute,
            remarks=(
                *(self.remarks or ()),
                *what_holds(solved, cost.total, bound, was_over, factor),
                *self._remarks(back),
            ),
            origin=self.traced,
            in_tree=call.arguments.tree,
            out_tree=call.results.tree,
            in_leaves=call.arguments.leaves,
        )

    def _remarks(self, back: Readback) -> Iterator[str]:
        yield from differing(self.graph)
        yield from call_remarks(self.traced.call.program.sharded_calls)
        yield from carried_remarks(self.graph)
        yield from kernel_remarks(self.graph)
        yield from foreign_remarks(self.graph, back.formulation.mesh.chip)
        yield from attention_remarks(self.graph, back.formulation.mesh.num_devices)
        yield from slow_remarks(self.graph, back.formulation.mesh.chip)
        yield from dense_remarks(self.graph, back.formulation.mesh.chip)
        yield from self._uneven(back)

    def _uneven(self, back: Readback) -> list[str]:
        """What the number of devices does not divide of the state and of the batch, where the method splits them."""
        whole, data = back.formulation.restrictions.whole, list(self.roles.data)
        state = [v for v in (*self.roles.parameters, *self.roles.optimizer) if v not in whole]
        kinds = [self.graph.types[v] for v in state]
        found = uneven_state(kinds, back.axes.num_parts(back.made[state]).tolist(), back.axes)
        if self.method.spreads_batch:
            rows = [self.graph.types[v].shape[:1] for v in data]
            found += uneven_batch(rows, back.axes.num_parts(back.made[data]).tolist(), back.axes.num_devices)
        return found

    def _arguments(self, back: Readback) -> Iterator[Tensor]:
        graph, roles = self.graph, self.roles
        named = dict.fromkeys(roles.parameters, "parameters") | dict.fromkeys(roles.optimizer, "optimizer")
        lie = self._lie(back, graph.inputs, back.made[list(graph.inputs)].tolist())
        for place in self.traced.call.arguments.positions:
            if place is None:
                yield KEPT
                continue
            value = graph.inputs[place]
            role, donated = named.get(value, "data"), value in graph.donated
            yield Tensor(graph.input_paths[place], *lie[place], role, donated)

    def _results(self, back: Readback) -> Iterator[Tensor]:
        graph, fixed = self.graph, back.formulation.restrictions.results
        taken, made = (back.made[list(values)].tolist() for values in (graph.inputs, graph.outputs))
        for output, argument in graph.state.items():
            made[output] = taken[argument]
        for output, code in fixed.items():
            if output not in graph.state:
                made[output] = code
        lie = self._lie(back, graph.outputs, made)
        for place in self.traced.call.results.positions:
            if place is None:
                yield KEPT
                continue
            yield Tensor(graph.output_paths[place], *lie[place], "state" if place in graph.state else "result")

    def _lie(self, back: Readback, values: Sequence[int], codes: Sequence[int]) -> list[Lie]:
        """Shape, dtype and sharding of arguments or results, given by their codes.

        Arrays without elements are replicated, since JAX cannot read them back if they are split.
        """
        rows = list(zip(self.graph.kind[list(values)].tolist(), codes, strict=True))
        known = {}
        for number, code in dict.fromkeys(rows):
            kind = self.graph.kinds[number]
            spec = back.spec(0 if 0 in kind.shape or not kind.itemsize else code, len(kind.shape))
            known[number, code] = kind.shape, kind.dtype, spec
        return [known[row] for row in rows]

    def _argument_bytes(self, back: Readback) -> dict[str, int]:
        named = {"parameters": self.roles.parameters, "optimizer": self.roles.optimizer, "data": self.roles.data}
        held = self.graph.num_bytes / back.axes.num_parts(back.made)
        return {name: int(held[list(values)].sum()) for name, values in named.items()}

    def _host_bytes(self, back: Readback) -> int:
        """The most bytes that a device keeps on its host at once."""
        kinds, live = self.graph.kinds, back.formulation.live
        away = np.array([kind.copied_bytes if kind.on_host else 0 for kind in kinds], np.int64)[self.graph.kind]
        held, change = away / back.axes.num_parts(back.made), np.zeros(live.num_steps + 1)
        np.add.at(change, live.start, held)
        np.subtract.at(change, live.stop, held)
        return round(np.cumsum(change).max(initial=0.0))


def provenance(traced: Traced, mesh: Mesh, memory: float, calibration: str = "") -> dict[str, Any]:
    """Which function was planned, and where the numbers of the plan come from.

    Args:
        traced: The function.
        mesh: The mesh of the plan.
        memory: Measured ÷ modelled memory; 1 where nothing is known.
        calibration: What is known of the chip.
    """
    import jax

    where = "abstract mesh" if mesh.cluster is None else f"{mesh.cluster.known}, roofline and α–β"
    loops = loops_in(traced.graph)
    notes = {
        "model": _model(traced.function),
        "meshwright": meshwright.__version__,
        "jax": jax.__version__,
        "costs": where,
    }
    return (
        notes
        | ({"loops": loops} if loops else {})
        | ({} if memory == 1 else {"memory factor": memory})
        | ({"calibration": calibration} if calibration else {})
    )


def _model(function: Any) -> str:
    """The name of a function; empty if it has none."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    name = str(getattr(function, "__qualname__", "")).rsplit("<locals>.", 1)[-1]
    return "" if name.startswith("<") else name
