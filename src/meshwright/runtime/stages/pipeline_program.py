"""A function that runs as a pipelined plan says; it is called like a program without stages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import jax
from jax.tree_util import tree_flatten

from meshwright.errors import ShardingError
from meshwright.graph import Traced
from meshwright.hardware.clusters import AXIS_NAMES
from meshwright.plan_files.stored_operations import parse_ops
from meshwright.plans.operations import OpPlan
from meshwright.plans.plan import PlanData
from meshwright.runtime import interrupts
from meshwright.runtime.cpu_turns import put_in_turn
from meshwright.runtime.microbatches.cut_operations import CannotCut, Cut
from meshwright.runtime.microbatches.cut_step import CutStep
from meshwright.runtime.spmd import Strange, check_types
from meshwright.runtime.stages.cutting.assignment import assign
from meshwright.runtime.stages.cutting.layer_loops import SplitStep, split_layers
from meshwright.runtime.stages.cutting.layer_stack import LayerStack, StackSharding, stacked
from meshwright.runtime.stages.engine import Engine
from meshwright.runtime.stages.lowering.layout import in_pieces, leaf_shardings, of_pieces, stage_devices
from meshwright.runtime.stages.printing import Printing, returning_printed
from meshwright.runtime.stages.recording import Recording


class PipelineProgram:
    """A step that runs in stages.

    Args:
        plan: A pipelined plan that was made for the function.
        traced: The function, traced with the whole batch.
        batch: Positions of the arguments whose leaves are examples stacked along their first dim.
        devices: Devices to use; all by default.
        is_whole: Whether to examine the stages of all processes; such a program is not called.

    Attributes:
        plan: The plan.
        engine: Carries out the instructions of its stages.

    Raises:
        ShardingError: The step cannot be cut into the plan's microbatches; the message says why.
        ClusterError: There are too few devices.
    """

    def __init__(
        self,
        plan: PlanData,
        traced: Traced,
        batch: Sequence[int],
        devices: Sequence[Any] | None = None,
        is_whole: bool = False,
    ):
        assert plan.pipeline is not None
        self.plan = plan
        self._call = traced.call
        self._is_compiled = False
        stages = stage_devices(plan, devices)
        taken = [t for t in plan.arguments if t.role != "static"]
        check_types(taken, traced.call.program.input_types)
        self._split, steps = _cut(plan, traced, batch)
        self._printing = Printing(self._split.program)
        counts = _counts(plan)
        ordered = [steps[count] for count in counts]
        self.engine = Engine(plan, self._split.assignment, ordered, stages, stage_ops(plan), is_whole)
        self._stages = stages
        shardings = leaf_shardings(plan, stages)
        self.shardings = [s for s, tensor in zip(shardings, plan.arguments, strict=True) if tensor.role != "static"]
        self._state = dict(traced.graph.state)
        self._types, self._paths = [(tuple(t.shape), t.dtype) for t in taken], [t.path for t in taken]
        self._names = {x.dtype: str(x.dtype) for x in traced.call.program.input_types}  # NumPy takes long to write them

    def __call__(self, *args: Any) -> Any:
        try:
            return self.quick(*args)
        except Strange as error:
            raise ShardingError(str(error)) from None

    def quick(self, *args: Any) -> Any:
        """The results of the step; raises `Strange` where the arguments are not those that it was planned for."""
        leaves, tree = tree_flatten(args)
        if tree != self._call.arguments.tree:
            raise Strange(f"the plan is for arguments of the structure {self._call.arguments.tree}, not {tree}")
        arguments = self._call.arguments
        arrays = [x for x, p in zip(leaves, arguments.positions, strict=True) if p is not None]
        if len(arrays) < len(leaves):
            kept = zip(leaves, arguments.leaves, arguments.positions, strict=True)
            if not all(x is leaf or (type(x) is type(leaf) and x == leaf) for x, leaf, p in kept if p is None):
                raise Strange("leaves that are not arrays have other values than those that it was planned with")
        for place, (array, kind) in enumerate(zip(arrays, self._types, strict=True)):
            if not isinstance(array, jax.Array | LayerStack):
                found = (tuple(jax.numpy.shape(array)), str(jax.dtypes.result_type(array)))
            elif array.is_deleted():
                raise Strange(f"{self._paths[place]} is deleted: it was donated to an earlier step")
            else:
                found = (array.shape, self._names.get(array.dtype) or str(array.dtype))
            if found != kind:
                raise Strange(f"{self._paths[place]} is not {kind[1]}{list(kind[0])}, as it was planned")
        self.compile()
        with interrupts.hold:
            pieces, count = self._pieces(arrays), len(self._split.results)
            printed = self._printing.given(pieces)
            results = self.engine.run(pieces)
            self._printing.run(printed, results[count:])
            return self._call.results.fill(self._joined(results[:count]))

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Records the step that is called within."""
        self.compile()
        plain = self.engine.bound
        recording = Recording(plain)
        self.engine.bound = recording.bound
        try:
            yield recording
        finally:
            self.engine.bound = plain

    def _pieces(self, arrays: Sequence[Any]) -> list[Any]:
        """The leaves of the step whose stacks are in pieces."""
        stacks: dict[int, list[Any]] = {}
        for leaf in dict.fromkeys(leaf for leaf, piece in self._split.leaves if piece >= 0):
            array, sharding = arrays[leaf], self.shardings[leaf]
            if isinstance(sharding, StackSharding):
                stacks[leaf] = list(stacked(array, sharding).pieces)
                continue
            array = array.array() if isinstance(array, LayerStack) else array
            if getattr(array, "sharding", None) != sharding:
                array = put_in_turn([array], [sharding])[0]
            stacks[leaf] = in_pieces(array, self._stages)
        return [arrays[leaf] if piece < 0 else stacks[leaf][piece] for leaf, piece in self._split.leaves]

    def _joined(self, results: Sequence[Any]) -> list[Any]:
        """The results of the whole step."""
        found: dict[int, list[Any]] = {}
        stacks = {place for place, piece in self._split.results if piece >= 0}
        for (place, _), array in zip(self._split.results, results, strict=True):
            found.setdefault(place, []).append(array)
        return [self._stack(place, found[place]) if place in stacks else found[place][0] for place in sorted(found)]

    def _stack(self, place: int, pieces: Sequence[Any]) -> jax.Array | LayerStack:
        """The next value of a stack."""
        sharding = self.shardings[self._state[place]]
        assert sharding is not None
        return LayerStack(pieces, sharding) if isinstance(sharding, StackSharding) else of_pieces(pieces, sharding)

    def compile(self, say: Callable[[str], None] | None = None) -> None:
        """Compiles all stages, unless they are compiled already."""
        if not self._is_compiled:
            self.engine.compile(say)
            if self.engine.transport:
                record = {**self.plan.provenance, "transport": self.engine.transport}
                self.plan = replace(self.plan, provenance=record)
            self._is_compiled = True

    def lower(self, *args: Any) -> NoReturn:
        raise ShardingError("a pipeline is several programs: its `engine.lowered` has them by kind, stage and place")


def why_not_cut(plan: PlanData, traced: Traced, batch: Sequence[int]) -> str:
    """Why a step cannot run in the stages of a plan; empty if it can. Arguments as in `PipelineProgram`."""
    try:
        _cut(plan, traced, batch)
    except ShardingError as error:
        return str(error)
    return ""


def _counts(plan: PlanData) -> list[int]:
    """Into how many parts each stage cuts the batch: microbatches, and replicas of each."""
    assert plan.pipeline is not None
    return [plan.pipeline.num_microbatches * stage.mesh.sizes[0] for stage in plan.stages]


def _cut(plan: PlanData, traced: Traced, batch: Sequence[int]) -> tuple[SplitStep, dict[int, CutStep]]:
    """The step with its loops over layers split, and cut into each number of parts.

    Raises:
        ShardingError: It cannot be cut without changing its numbers, or at these layers.
    """
    assert plan.pipeline is not None
    examples, counts = _examples(traced, batch), dict.fromkeys(_counts(plan))
    _check_rows(plan, traced, examples)
    assignment = assign(plan, traced.graph, traced.call.program)
    try:
        split = split_layers(traced.call.program, assignment, examples, max(counts))
        given = [examples[leaf] for leaf, _ in split.leaves]
        program = returning_printed(split.program)
        if set(counts) == {1}:
            updates = [number for number, is_update in enumerate(split.assignment.is_update) if is_update]
            return split, {1: CutStep(program, given, Cut(1, 1), updates)}
        return split, {count: CutStep(program, given, Cut(count, 1)) for count in counts}
    except CannotCut as reason:
        raise ShardingError(
            f"the step cannot be cut into {plan.pipeline.num_microbatches} microbatches without changing its numbers: "
            f"{reason}. Plan it without stages, such as with mw.Auto(), or run the whole batch as one microbatch"
        ) from None


def _check_rows(plan: PlanData, traced: Traced, examples: Sequence[bool]) -> None:
    """Refuses a batch that the plan's microbatches and replicas do not divide."""
    assert plan.pipeline is not None
    for path, aval, is_batch in zip(traced.graph.input_paths, traced.call.program.input_types, examples, strict=True):
        rows = aval.shape[0] if is_batch and aval.shape else 0
        for stage, count in zip(plan.stages, _counts(plan), strict=True):
            if rows % count:
                raise ShardingError(
                    f"the plan cuts the batch into {plan.pipeline.num_microbatches} microbatches for "
                    f"{stage.mesh.sizes[0]} replicas, and {path} has {rows} rows, which are no multiple of {count}: "
                    f"give a multiple of {count}, or make the plan again with this batch"
                )


def stage_ops(plan: PlanData) -> list[dict[int, OpPlan]]:
    """How the operations of one replica of each stage are split; none where it is one device."""
    record = plan.staged_record
    found = [{op.serial: op for op in parse_ops(view.ops, AXIS_NAMES, "ops")} for view in record.views]
    for stage, view in zip(plan.stages, record.view, strict=True):
        if stage.replica.num_devices > 1 and not found[view]:
            raise ShardingError(
                "the plan was made by an earlier version, which did not record how its stages split their operations; "
                "make it again"
            )
    return [found[view] for view in record.view]


def _examples(traced: Traced, batch: Sequence[int]) -> list[bool]:
    """For each array of the arguments, whether it is part of the batch."""
    leaves = [
        number for number, child in enumerate(traced.call.arguments.tree.children()) for _ in range(child.num_leaves)
    ]
    pairs = zip(leaves, traced.call.arguments.positions, strict=True)
    return [number in batch for number, position in pairs if position is not None]
