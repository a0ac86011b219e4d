"""The Plan: everything decided, with its predicted cost and why; plain data that needs no JAX to be read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.errors import ShardingError
from meshwright.hardware import Mesh
from meshwright.names import one_line
from meshwright.plans.operations import Collective as Collective
from meshwright.plans.operations import Details as Details
from meshwright.plans.operations import KnownDetails as KnownDetails
from meshwright.plans.operations import Load as Load
from meshwright.plans.operations import OpPlan as OpPlan
from meshwright.plans.paths import match_paths, nearest
from meshwright.plans.search_log import Considered as Considered
from meshwright.plans.stage import Pipeline, Stage
from meshwright.plans.tensor import Spec, Tensor
from meshwright.schema import Size
from meshwright.solver.problem.gap import relative_gap
from meshwright.units import format_bytes

PROVEN_GAP = 1e-3  # up to which a plan counts as optimal: what costs are known to is far coarser


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted time of one step: seconds, or an abstract mesh's own units."""

    compute: float
    communication: float

    @property
    def total(self) -> float:
        return self.compute + self.communication


@dataclass(frozen=True, slots=True)
class Memory:
    """Predicted memory of one device.

    Attributes:
        peak_bytes: The most that is live at once.
        limit_bytes: What the plan was allowed to use; None without a limit.
        argument_bytes: Bytes of the arguments' shards, by role.
        peak_operation: What runs when the peak is reached.
    """

    peak_bytes: Size
    limit_bytes: Size | None
    argument_bytes: Mapping[str, Size]
    peak_operation: str


@dataclass(frozen=True, slots=True)
class SolutionSummary:
    """How sure the plan is to be the best.

    Attributes:
        status: ``optimal`` where the lower bound proves that no plan which fits costs less on this mesh, up to a gap of
            `PROVEN_GAP`; else ``feasible``.
        lower_bound: No plan that fits costs less on this mesh: a bound on the unfolded problem, and never below 0.
        gap: ``(cost − lower bound) ÷ lower bound``; inf where something costs more than a bound of 0.
        seconds: Time spent on formulating and solving; not saved, so that equal plans make equal files.
        folded: How the folded problem was left, in which layers that repeat share one choice: ``optimal`` where no
            such choice is cheaper with the memory that was held, else ``feasible``; empty where nothing was folded.
    """

    status: str
    lower_bound: float
    gap: float
    seconds: float = field(default=0.0, compare=False)
    folded: str = ""

    @classmethod
    def proven(cls, cost: float, bound: float, seconds: float = 0.0, folded: str = "") -> "SolutionSummary":
        """What a lower bound says of a cost; rounding may bring it above the cost, and prices of memory below 0."""
        bound = min(max(bound, 0.0), cost)
        gap = relative_gap(cost, bound)
        return cls("optimal" if gap <= PROVEN_GAP else "feasible", bound, gap, seconds, folded)


@dataclass(frozen=True)
class Plan:
    """What to do and what it will cost.

    Examples:
        >>> import jax.numpy as jnp, meshwright as mw
        >>> mesh = mw.Mesh.abstract((4,), alpha=(1,), beta=(1,))
        >>> plan = mw.plan(lambda x, w: x @ w, jnp.ones((8, 4)), jnp.ones((4, 4)), mesh=mesh)
        >>> plan.mesh.shape, str(plan.solution.status)
        ({'x': 4}, 'optimal')
    """

    mesh: Mesh
    method: str
    cost: Cost
    flops: float  # of matrix products and convolutions, on one device
    memory: Memory
    solution: SolutionSummary
    arguments: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    details: Details
    unsplittable: tuple[str, ...]
    considered: tuple[Considered, ...]
    provenance: Mapping[str, Any]
    pipeline: Pipeline | None = None  # how its stages work together; None for one program over the whole mesh
    stages: tuple[Stage, ...] = ()
    remarks: tuple[str, ...] = ()  # what the user should know of how it was made, a sentence each
    in_tree: Any = field(default=None, repr=False, compare=False)  # JAX's own structures, while the plan is fresh
    out_tree: Any = field(default=None, repr=False, compare=False)
    in_structure: Any = field(default=None, repr=False)  # JSON-like pictures of them, once it was saved and loaded
    out_structure: Any = field(default=None, repr=False)
    origin: Any = field(default=None, repr=False, compare=False)  # the traced function, likewise
    in_leaves: Any = field(default=None, repr=False, compare=False)  # what is kept among the arguments, while fresh

    def __eq__(self, other: object) -> bool:
        from meshwright.plans.storage import comparable

        return comparable(self) == comparable(other) if isinstance(other, Plan) else NotImplemented

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every communication, in the order of the operations."""
        return self.details.collectives

    @property
    def ops(self) -> tuple[OpPlan, ...]:
        """How every operation is split, in the order of the program; virtual ones follow their readers."""
        return self.details.ops

    @cached_property
    def record(self) -> Any:
        """What is kept of the program and of the search: a `plans.records.record.Record`, with
        stages a `StagedRecord`; None where nothing is known."""
        return self.details.make_record(self.memory.limit_bytes)

    @cached_property
    def judgement(self) -> Any:
        """What the plan amounts to: a `plans.records.judgement.Judgement`."""
        return self.details.make_judgement(self)

    @property
    def verdict(self) -> Any:
        """What kind of parallelism it is; print it."""
        return self.judgement.verdict

    @property
    def stage_verdicts(self) -> tuple[Any, ...]:
        """What kind of parallelism each stage is; none for a plan without stages."""
        return self.judgement.stages

    @property
    def step_s(self) -> float:
        """Predicted time of one step, compute and communication one after the other."""
        return self.cost.total

    @property
    def in_shardings(self) -> Any:
        """``PartitionSpec``s in the structure of the tuple of arguments."""
        return self._tree(self.in_tree, self.in_structure, self.arguments)

    @property
    def out_shardings(self) -> Any:
        """``PartitionSpec``s in the structure of the results."""
        return self._tree(self.out_tree, self.out_structure, self.results)

    def sharding(self, path: str) -> Any:
        """The ``PartitionSpec`` of an argument or result; a glob gives a dict of all that it matches.

        Args:
            path: Parameter name and pytree keys joined by ``/``; results start with ``out``.
        """
        found = self.find(path)
        specs = {t.path: partition_spec(t.spec) for t in found}
        return specs[path] if list(specs) == [path] else specs

    def find(self, path: str) -> list[Tensor]:
        """The arguments and results that a path or a glob matches.

        Raises:
            ShardingError: It matches none; the message names the nearest.
        """
        if not isinstance(path, str):
            raise ShardingError(f"a tensor is found by its path, as text, not by {path!r:.60}")
        tensors = {t.path: t for t in (*self.arguments, *self.results) if t.role != "static"}
        found = match_paths(path, tensors)
        if not found:
            raise ShardingError(f"{path!r} matches no argument or result of the plan; {nearest(path, list(tensors))}")
        return [tensors[p] for p in found]

    def kind(self, path: str) -> Any:
        """The part that a tensor plays, e.g. ``"tensor (column)"``; a glob gives a dict of all that it matches."""
        kinds = {t.path: self.judgement.kinds[t.path] for t in self.find(path)}
        return kinds[path] if list(kinds) == [path] else kinds

    def show(self, path: str = "*") -> Any:
        """A table of the tensors that a path or a glob matches: shape, sharding, bytes per device, kind. Print it."""
        from meshwright.explain.show.tensor_table import show

        return show(self, path)

    def explain(self, path: str, seconds: float = 0.2) -> Any:
        """Why an argument or result is split as it is, and what else would cost. Print it.

        Args:
            path: Of one tensor.
            seconds: Time to solve again; what it does not suffice for is bounded, or left and counted.

        Returns:
            An `Explanation`: the runner-ups, each at the cost of the best plan that has it, and what forced the choice.
        """
        from meshwright.explain.alternatives.why import explain

        return explain(self, path, seconds)

    def diff(self, other: "Plan") -> Any:
        """What differs from another plan: verdict, costs, memory, shardings, communication. Print it."""
        from meshwright.explain.show.diff import diff

        return diff(self, _plan(other))

    def report(self, path: str | Path, other: "Plan | None" = None, seconds: float = 20.0) -> None:
        """Writes one self-contained web page about the plan; with another plan, about both, side by side.

        Args:
            path: The page.
            other: Another plan.
            seconds: Time for the page, most of which goes to solving for what else was possible; what it does not
                suffice for is bounded. There are no alternatives with 0.
        """
        from meshwright.report.page import write_report

        write_report(self, Path(path), None if other is None else _plan(other), seconds)

    def dump(self, folder: str | Path, function: Any = None, *args: Any) -> None:
        """Writes everything there is to know about the plan into a folder.

        Args:
            folder: The folder; made if it is not there.
            function: The function and its arguments or their types, to compile it; a fresh plan knows them.
            *args: See there.
        """
        from meshwright.explain.export.dump import dump

        dump(self, Path(folder), function, args)

    def save(self, path: str | Path) -> None:
        """Writes the plan as versioned JSON."""
        from meshwright.plans.storage import save_plan

        save_plan(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads a plan that `save` wrote."""
        from meshwright.plans.storage import load_plan

        return load_plan(Path(path))

    def simulate(self, cluster: Any = None) -> Any:
        """Simulates one step, event by event: see `mw.simulate`."""
        from meshwright.simulator.simulate import simulate

        return simulate(self, cluster)

    def verify(self, function: Any = None, *args: Any, devices: Any = None, compiler_options: Any = None) -> Any:
        """Compiles the program and holds what was planned against what XLA makes of it.

        Args:
            function: The function that the plan is for, and its arguments or their types; a fresh plan knows them.
            *args: See there.
            devices: Devices to compile for, as many as the mesh has: those of this process by default, or those of a
                machine that is not there (`jax.experimental.topologies`).
            compiler_options: XLA's options by name.

        Returns:
            A `Verification`: collectives by kind and axes, memory and flops, planned and compiled. Print it.
        """
        from meshwright.runtime.checking.verify import verify

        return verify(self, function, args, devices, compiler_options)

    def __repr__(self) -> str:
        from meshwright.plans.text import axes_text, cost_text

        where = "" if self.mesh.cluster is None else f" of {one_line(self.mesh.cluster.name)}"
        step, peak = cost_text(self, self.cost.total), format_bytes(self.memory.peak_bytes)
        return f"<Plan: {self.method} on mesh {axes_text(self)}{where}, step {step}, {peak} per device>"

    def __str__(self) -> str:
        from meshwright.explain.show.plan_text import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from meshwright.report.page import notebook_html

        return notebook_html(self)

    def _tree(self, tree: Any, structure: Any, tensors: tuple[Tensor, ...]) -> Any:
        from meshwright.plans.pytree_json import rebuild

        specs = [partition_spec(t.spec) for t in tensors]
        if tree is None:
            return rebuild(structure, specs)
        import jax

        return jax.tree_util.tree_unflatten(tree, specs)


def _plan(other: Any) -> Plan:
    if not isinstance(other, Plan):
        raise ShardingError(f"{other!r:.60} is no plan to compare with; give one that mw.plan or mw.Plan.load returned")
    return other


def partition_spec(spec: Spec) -> Any:
    """JAX's ``PartitionSpec`` of a sharding; trailing unsplit dims are left out, as JAX users write them."""
    from jax.sharding import PartitionSpec

    dims = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec]
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)
