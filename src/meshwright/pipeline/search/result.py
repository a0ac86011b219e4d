"""A pipeline as the search found it."""

from dataclasses import dataclass

from meshwright.pipeline.prices.stage_options import Option
from meshwright.plans.stage import Pipeline


@dataclass(frozen=True)
class FoundStage:
    """A stage of a pipeline that the search found.

    Attributes:
        chunks: Its layers.
        group: Number of its group of hosts.
        option: How it is split.
        in_flight: Microbatches that it holds.
        near: Whether it sends to a stage on the same host.
    """

    chunks: tuple[tuple[int, int], ...]
    group: int
    option: Option
    in_flight: int
    near: bool


@dataclass(frozen=True)
class FoundPipeline:
    """A pipeline, and the time of a step."""

    total_s: float
    pipeline: Pipeline
    stages: tuple[FoundStage, ...]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Group and number of devices of each stage."""
        return [(stage.group, stage.option.mesh.num_devices) for stage in self.stages]
