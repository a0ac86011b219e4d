"""What a fresh pipelined plan knows of its program and of the search."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.hardware import Cluster
from meshwright.pipeline.layers.batch_sizes import Rows
from meshwright.pipeline.layers.layers import Layers
from meshwright.pipeline.prices.catalogue import Catalogue
from meshwright.pipeline.search.result import Found, FoundStage
from meshwright.plans.operations import Collective, OpPlan
from meshwright.plans.plan import Plan


@dataclass(frozen=True)
class StagedDetails:
    """The details of a pipelined plan; what is sent and how operations are split, stages tell by themselves.

    It holds what prices were made from, not the prices: those of all views that were tried take more than the model.

    Attributes:
        rows, layers, cluster, limits, grid: As in `Catalogue`.
        stages: The stages as they were found.
        num_microbatches: Into how many microbatches the batch is cut.
    """

    rows: Rows
    layers: Layers
    cluster: Cluster
    limits: Sequence[float]
    grid: Sequence[int]
    stages: tuple[FoundStage, ...]
    num_microbatches: int
    collectives: tuple[Collective, ...] = ()
    ops: tuple[OpPlan, ...] = ()

    @classmethod
    def of(cls, catalogue: Catalogue, found: Found) -> "StagedDetails":
        """The details of a pipeline that was found."""
        parts = (catalogue.rows, catalogue.layers, catalogue.cluster, catalogue.limits, catalogue.grid)
        return cls(*parts, found.stages, found.pipeline.num_microbatches)

    def make_record(self, limit: float | None) -> Any:
        """See `Details`; every group of hosts has a limit of its own."""
        from meshwright.pipeline.stage_records import make_staged_record

        return make_staged_record(self)

    def make_judgement(self, plan: Plan) -> Any:
        """See `Details`."""
        from meshwright.explain.judge import judge_stages

        return judge_stages(plan)
