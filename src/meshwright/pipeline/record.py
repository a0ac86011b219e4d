"""The record of a fresh pipelined plan: its program and its search; each view of its stages is solved once more."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from math import prod

import numpy as np

from meshwright.arrays import Bools, Ints
from meshwright.graph.tracing.garbage import heap_frozen
from meshwright.hardware import Cluster, Mesh
from meshwright.parallelism.judge import judge_stages
from meshwright.pipeline.layers.batch_sizes import ResizableBatch, Resized
from meshwright.pipeline.layers.layers import Layers
from meshwright.pipeline.prices.catalogue import FREE, Catalogue, Way, price_way, submesh
from meshwright.pipeline.prices.layer_prices import LayerPrices
from meshwright.pipeline.prices.layer_pricing import Pricing
from meshwright.pipeline.prices.microbatch_weights import once_s
from meshwright.pipeline.search.result import FoundPipeline, FoundStage
from meshwright.plan_files.stored_operations import ops_to_json
from meshwright.planner.reading.operations import OpPlans
from meshwright.planner.reading.readback import Readback
from meshwright.planner.reading.record import make_record, plain_nest, unrestricted
from meshwright.plans.operations import Collective, OpPlan
from meshwright.plans.plan import PlanData
from meshwright.plans.records.judgement import Judgement
from meshwright.plans.records.record import Record
from meshwright.plans.records.staged_record import StagedRecord, StageView
from meshwright.program.text import program_form

_Key = tuple[int, tuple[int, ...], Way, int]  # group of hosts, the stage's mesh, its way, rows of a replica


@dataclass(frozen=True)
class StagedDetails:
    """The details of a pipelined plan; its stages themselves hold their communication and the splits of operations.

    It holds the inputs of the prices, not the prices: the prices of all views take more memory than the model.

    Attributes:
        rows, layers, cluster, limits, grid: As in `Catalogue`.
        stages: The stages as they were found.
        num_microbatches: Into how many microbatches the batch is cut.
    """

    rows: ResizableBatch
    layers: Layers
    cluster: Cluster
    limits: Sequence[float]
    grid: Sequence[int]
    stages: tuple[FoundStage, ...]
    num_microbatches: int
    collectives: tuple[Collective, ...] = ()
    ops: tuple[OpPlan, ...] = ()

    @classmethod
    def of(cls, catalogue: Catalogue, found: FoundPipeline) -> "StagedDetails":
        """The details of a pipeline that was found."""
        parts = (catalogue.rows, catalogue.layers, catalogue.cluster, catalogue.limits, catalogue.grid)
        return cls(*parts, found.stages, found.pipeline.num_microbatches)

    def make_record(self, limit: float | None) -> StagedRecord:
        """See `Details`; every group of hosts has a limit of its own."""
        return make_staged_record(self)

    def make_judgement(self, plan: PlanData) -> Judgement:
        """See `Details`."""
        return judge_stages(plan)

    def make_form(self, plan: PlanData) -> str:
        """See `Details`."""
        return program_form(plan.origin.call.program)


def make_staged_record(plan: StagedDetails) -> StagedRecord:
    """The record of a plan's stages, made from the plan's details."""
    layers, graph = plan.layers, plan.rows.whole
    keys = [_key(plan, stage) for stage in plan.stages]
    distinct = list(dict.fromkeys(keys))
    with heap_frozen():
        views = [_view(plan, key) for key in distinct]
    return StagedRecord(
        views=views,
        view=[distinct.index(key) for key in keys],
        unit=layers.places.unit,
        first=layers.first,
        count=layers.count,
        argument_unit=np.array([layers.places.arguments[v][0] for v in graph.inputs], np.int64),
    )


def _key(plan: StagedDetails, stage: FoundStage) -> _Key:
    """The key of a stage's view; between two priced numbers of rows, the split of the smaller one holds."""
    sizes = stage.option.mesh.sizes
    rows = plan.rows.batch // plan.num_microbatches // sizes[0]
    way = stage.option.way if prod(sizes[1:]) > 1 else FREE
    return stage.group, sizes, way, max(n for n in plan.grid if n <= rows)


def _view(plan: StagedDetails, key: _Key) -> StageView:
    group, (data, *inner), way, rows = key
    resized = plan.rows.at(rows)
    assert resized is not None  # it was priced
    mesh = submesh(plan.cluster.groups[group], prod(inner)).mesh(inner)
    view = _Recorder(resized, plan.layers, plan.cluster.num_devices).view(mesh, way, rows, plan.limits[group])
    whole = plan.rows.at(data * rows)
    return view if whole is None else replace(view, record=_enlarged(view.record, whole))


class _Recorder(Pricing):
    """Prices a view again, and keeps the choice behind the prices."""

    _back: Readback | None = None

    def _read(self, back: Readback) -> LayerPrices:
        self._back = back
        return super()._read(back)

    def view(self, mesh: Mesh, way: Way, rows: int, limit: float) -> StageView:
        """The view of some stages."""
        price_way(self, mesh, way)
        back = self._back
        assert back is not None
        free = unrestricted(back.formulation)
        record = make_record(back, limit, free)
        once = [(i, seconds) for i, seconds in enumerate(once_s(free, self.ends)) if seconds.any()]
        folded, units = back.folded, self.units(back.folded)
        order = np.argsort(folded.untied.which, kind="stable")
        kinds, sent, at = _sent(back, self.ends)
        used = np.flatnonzero(self.live.stored & (self.live.stop > self.live.start) & (self.grouping.placed.home >= 0))
        return StageView(
            record=replace(record, problem=replace(record.problem, once=once)),
            rows=rows,
            member_node=np.array([*folded.group_class, *folded.shared_class], np.int64),
            member_unit=units,
            source_unit=units[folded.untied.source[order]],
            held=used[used < len(self.graph.inputs)],
            sent_kinds=kinds,
            sent=sent,
            sent_op=at,
            ops=ops_to_json(OpPlans(back).all()) if mesh.num_devices > 1 else [],
        )


def _enlarged(record: Record, whole: Resized) -> Record:
    """A replica's record with the program of the whole microbatch; the problem keeps the replica's types."""
    program, (graph, nests) = record.program, whole
    examples = np.unique(program.nest, return_index=True)[1]
    kinds = [(kind.shape, kind.dtype, kind.itemsize) for kind in graph.kinds]
    larger = replace(
        program,
        types=[*program.types, *kinds],
        kind=len(program.types) + graph.kind,
        nests=[plain_nest(nests[number]) for number in graph.columns.signature[examples].tolist()],
    )
    return replace(record, program=larger)


def _sent(back: Readback, ends: Bools) -> tuple[list[tuple], Ints, Ints]:
    """Distinct collectives, the index of each one that occurs, and the operation at which it occurs.

    Those of weights' gradients are made once a step; what other backward operations sum, for each microbatch.
    """
    at = {op.serial: i for i, op in enumerate(back.graph.ops)}
    known: dict[tuple, int] = {}
    sent, ops = [], []
    for item in back.collectives:
        if item.serial in at:
            is_once = item.purpose != "gradient" or ends[at[item.serial]]
            kind = astuple(replace(item, serial=-1, purpose=item.purpose if is_once else "activation"))[:9]
            sent.append(known.setdefault(kind, len(known)))
            ops.append(at[item.serial])
    return list(known), np.array(sent, np.int64), np.array(ops, np.int64)
