"""A function that runs as a pipelined plan says; it is called like a program without stages."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten

from meshwright.errors import ShardingError
from meshwright.graph import Traced
from meshwright.hardware.clusters import AXIS_NAMES
from meshwright.plan_files.stored_operations import parse_ops
from meshwright.plans.operations import OpPlan
from meshwright.plans.plan import PlanData
from meshwright.runtime import interrupts
from meshwright.runtime.microbatches.cut_operations import CannotCut, Cut
from meshwright.runtime.microbatches.microbatches import CutStep
from meshwright.runtime.spmd import Strange, check_types
from meshwright.runtime.stages.engine import Engine
from meshwright.runtime.stages.layout import leaf_shardings, stage_devices


class PipelineProgram:
    """A step that runs in stages.

    Args:
        plan: A pipelined plan that was made for the function.
        traced: The function, traced with the whole batch.
        batch: Positions of the arguments whose leaves are examples stacked along their first dim.
        devices: Devices to use; all by default.

    Attributes:
        plan: The plan.
        engine: Carries out the instructions of its stages.

    Raises:
        ShardingError: The step cannot be cut into the plan's microbatches; the message says why.
        ClusterError: There are too few devices.
    """

    def __init__(self, plan: PlanData, traced: Traced, batch: Sequence[int], devices: Sequence[Any] | None = None):
        assert plan.pipeline is not None
        self.plan = plan
        self._call = traced.call
        self._is_compiled = False
        stages = stage_devices(plan, devices)
        taken = [t for t in plan.arguments if t.role != "static"]
        check_types(taken, traced.call.jaxpr.in_avals)
        examples = _examples(traced, batch)
        counts = [plan.pipeline.num_microbatches * stage.num_replicas for stage in stages]
        try:
            steps = {count: CutStep(traced.call, examples, Cut(count, 1)) for count in dict.fromkeys(counts)}
        except CannotCut as reason:
            raise ShardingError(
                f"the step cannot be cut into {plan.pipeline.num_microbatches} microbatches without changing its "
                f"numbers: {reason}. Plan it without stages, such as with mw.Auto()"
            ) from None
        self.engine = Engine(plan, traced, [steps[count] for count in counts], stages, stage_ops(plan))
        shardings = leaf_shardings(plan, stages)
        self.shardings = [s for s, tensor in zip(shardings, plan.arguments, strict=True) if tensor.role != "static"]
        self._types = [(tuple(t.shape), t.dtype) for t in taken]

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
        arrays = [x for x, p in zip(leaves, self._call.arguments.positions, strict=True) if p is not None]
        for array, kind, tensor in zip(arrays, self._types, self._tensors, strict=True):
            if (tuple(jax.numpy.shape(array)), str(jax.dtypes.result_type(array))) != kind:
                raise Strange(f"{tensor.path} is not {kind[1]}{list(kind[0])}, as it was planned")
            if getattr(array, "is_deleted", bool)():
                raise Strange(f"{tensor.path} is deleted: it was donated to an earlier step")
        self.compile()
        with interrupts.hold:
            return self._call.results.fill(self.engine.run(arrays))

    @property
    def _tensors(self) -> list[Any]:
        return [t for t in self.plan.arguments if t.role != "static"]

    def compile(self, say: Callable[[str], None] | None = None) -> None:
        """Compiles all stages, unless they are compiled already."""
        if not self._is_compiled:
            self.engine.compile(say)
            self._is_compiled = True

    def lower(self, *args: Any) -> Any:
        raise ShardingError("a pipeline is several programs: its `engine.lowered` has them by kind, stage and place")


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
