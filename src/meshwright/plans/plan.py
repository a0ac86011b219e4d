"""A plan as plain data: all decisions with their predicted cost and their reasons; it can be read without JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

from meshwright.errors import ShardingError
from meshwright.hardware import Mesh
from meshwright.plans.compiler_options import options_of, platform_of
from meshwright.plans.operations import Collective as Collective
from meshwright.plans.operations import OpPlan as OpPlan
from meshwright.plans.paths import match_paths, nearest
from meshwright.plans.pytree_json import rebuild
from meshwright.plans.records.judgement import Judgement, Verdict
from meshwright.plans.search_log import Compared as Compared
from meshwright.plans.search_log import Considered as Considered
from meshwright.plans.stage import Pipeline, Stage
from meshwright.plans.tensor import Spec, Tensor
from meshwright.schema import Amount, Size
from meshwright.solver.problem.gap import relative_gap

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from meshwright.plans.records.record import Record
    from meshwright.plans.records.staged_record import StagedRecord

PROVEN_GAP = 1e-3  # gap up to which a plan counts as optimal: costs are far less accurate than this


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted time of one step: seconds, or an abstract mesh's own units.

    Attributes:
        compute, communication: All of it, as the search adds it up.
        step: One step as it is simulated, communication beside compute; 0 where it is not, as on an abstract mesh.
        waiting: The part of `step` in which devices do not compute: they wait for communication, or for other stages.
    """

    compute: Amount
    communication: Amount
    step: Amount = 0.0
    waiting: Amount = 0.0

    @property
    def total(self) -> float:
        """All costs, one after the other: what the search minimises, where it does not count on overlap."""
        return self.compute + self.communication


@dataclass(frozen=True, slots=True)
class Memory:
    """Predicted memory of one device.

    Attributes:
        peak_bytes: The largest number of bytes that are live at once.
        limit_bytes: The limit of the plan; None without one.
        argument_bytes: Bytes of the arguments' shards, by role.
        peak_operation: The operation that runs at the peak.
        host_bytes: The largest number of bytes that it keeps in the memory of its host meanwhile.
    """

    peak_bytes: Size
    limit_bytes: Size | None
    argument_bytes: Mapping[str, Size]
    peak_operation: str
    host_bytes: Size = 0


@dataclass(frozen=True, slots=True)
class SolutionSummary:
    """How close the plan is proved to be to the optimum.

    Attributes:
        status: ``optimal`` where the lower bound proves that no plan which fits costs less on this mesh, up to a gap of
            `PROVEN_GAP`; else ``feasible``.
        lower_bound: No plan that fits costs less on this mesh: a bound on the unfolded problem, and never below 0.
        gap: ``(cost − lower bound) ÷ lower bound``; inf where something costs more than a bound of 0.
        seconds: Time spent on formulating and solving; not saved, so that equal plans make equal files.
        folded: The status of the folded problem, in which repeated layers share one choice: ``optimal`` where no such
            choice is cheaper under the memory constraints, otherwise ``feasible``; empty where nothing was folded.
        of_any_program: No plan of one program costs less, whatever it recomputes and however many microbatches it has;
            0 where that is not known.
    """

    status: str
    lower_bound: Amount
    gap: float
    seconds: float = field(default=0.0, compare=False)
    folded: str = ""
    of_any_program: Amount = 0.0

    @classmethod
    def proven(cls, cost: float, bound: float, seconds: float = 0.0, folded: str = "") -> "SolutionSummary":
        """The summary of a cost and its bound, clipped to [0, cost]: rounding and prices of memory may move it out."""
        bound = min(max(bound, 0.0), cost)
        gap = relative_gap(cost, bound)
        return cls("optimal" if gap <= PROVEN_GAP else "feasible", bound, gap, seconds, folded)


class Details(Protocol):
    """The long lists of a plan; a fresh plan makes them on first use."""

    @property
    def collectives(self) -> tuple[Collective, ...]: ...

    @property
    def ops(self) -> tuple[OpPlan, ...]: ...

    def make_record(self, limit: float | None) -> "Record | StagedRecord | None":
        """The plan's `Record` or `StagedRecord`, given the bytes allowed on each device.

        It is None where nothing is known of the search.
        """

    def make_judgement(self, plan: "PlanData") -> Judgement:
        """The judgement of the plan."""

    def make_form(self, plan: "PlanData") -> str:
        """The form of the program whose operations `ops` are about; empty where it is not known."""


@dataclass(frozen=True, eq=False)
class PlanData:
    """A plan's decisions and predicted costs. `facade.Plan` adds the methods for users."""

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
    compared: tuple[Compared, ...] = ()  # other plans of the step that were made, the quickest first
    remarks: tuple[str, ...] = ()  # remarks for the user on how it was made, a sentence each
    microbatches: int = 1  # parts of the batch that run one after the other; also those of a pipeline
    batch_argnums: tuple[int, ...] = ()  # positions of the arguments that one program cuts into them
    recompute: str = "as written"  # what the backward pass computes again: a word of `runtime.recomputation`
    in_tree: Any = field(default=None, repr=False, compare=False)  # JAX's own structures, while the plan is fresh
    out_tree: Any = field(default=None, repr=False, compare=False)
    in_structure: Any = field(default=None, repr=False)  # their JSON-like form, once it was saved and loaded
    out_structure: Any = field(default=None, repr=False)
    origin: Any = field(default=None, repr=False, compare=False)  # the traced function, likewise
    in_leaves: Any = field(default=None, repr=False, compare=False)  # non-array leaves of the arguments, while fresh

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every communication, in the order of the operations."""
        return self.details.collectives

    @property
    def ops(self) -> tuple[OpPlan, ...]:
        """How every operation is split, in the order of the program; virtual ones follow their readers."""
        return self.details.ops

    @cached_property
    def record(self) -> "Record | StagedRecord | None":
        """The `Record` of the program and of the search, with stages a `StagedRecord`; None where nothing is known."""
        return self.details.make_record(self.memory.limit_bytes)

    @property
    def staged_record(self) -> "StagedRecord":
        """The record of a plan with stages."""
        assert self.stages and self.record is not None
        return cast("StagedRecord", self.record)

    @cached_property
    def judgement(self) -> Judgement:
        """The judgement of the plan."""
        return self.details.make_judgement(self)

    @cached_property
    def form(self) -> str:
        """The program whose ids `ops` have, as `program.text.program_form` writes it; empty where it is not known."""
        return self.details.make_form(self)

    @property
    def verdict(self) -> Verdict:
        """Its kinds of parallelism; print it."""
        return self.judgement.verdict

    @property
    def stage_verdicts(self) -> tuple[Verdict, ...]:
        """The kinds of parallelism of each stage; none for a plan without stages."""
        return self.judgement.stages

    @property
    def step_s(self) -> float:
        """Predicted time of one step: as simulated, on an abstract mesh the sum of all costs."""
        return self.cost.step or self.cost.total

    @property
    def compiler_options(self) -> dict[str, str | int | bool]:
        """The options of XLA that the plan counts on; `mw.parallelize` compiles with them."""
        return dict(options_of(platform_of(self.mesh.chip)))

    @property
    def in_shardings(self) -> Any:
        """``PartitionSpec``s in the structure of the tuple of arguments."""
        return self._tree(self.in_tree, self.in_structure, self.arguments)

    @property
    def out_shardings(self) -> Any:
        """``PartitionSpec``s in the structure of the results."""
        return self._tree(self.out_tree, self.out_structure, self.results)

    def sharding(self, path: str) -> "PartitionSpec | dict[str, PartitionSpec]":
        """The ``PartitionSpec`` of an argument or result; a glob gives a dict of all that it matches.

        Args:
            path: Parameter name and pytree keys joined by ``/``; results start with ``out``.
        """
        tensors = self.find(path)
        specs = {t.path: partition_spec(t.spec) for t in tensors}
        return specs[path] if list(specs) == [path] else specs

    def find(self, path: str) -> list[Tensor]:
        """The arguments and results that a path or a glob matches.

        Raises:
            ShardingError: It matches none; the message names the nearest.
        """
        if not isinstance(path, str):
            raise ShardingError(f"a tensor is found by its path, as text, not by {path!r:.60}")
        tensors = {t.path: t for t in (*self.arguments, *self.results) if t.role != "static"}
        matching = match_paths(path, tensors)
        if not matching:
            raise ShardingError(f"{path!r} matches no argument or result of the plan; {nearest(path, list(tensors))}")
        return [tensors[p] for p in matching]

    def kind(self, path: str) -> str | dict[str, str]:
        """The kind of a tensor, e.g. ``"tensor (column)"``; a glob gives a dict of all that it matches."""
        kinds = {t.path: self.judgement.kinds[t.path] for t in self.find(path)}
        return kinds[path] if list(kinds) == [path] else kinds

    def _tree(self, tree: Any, structure: Any, tensors: tuple[Tensor, ...]) -> Any:
        specs = [partition_spec(t.spec) for t in tensors]
        if tree is None:
            return rebuild(structure, specs)
        import jax

        return jax.tree_util.tree_unflatten(tree, specs)


def partition_spec(spec: Spec) -> "PartitionSpec":
    """JAX's ``PartitionSpec`` of a sharding; trailing unsplit dims are left out, as JAX users write them."""
    from jax.sharding import PartitionSpec

    dims = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec]
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)
