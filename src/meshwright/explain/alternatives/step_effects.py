"""The effect of another choice in one stage: on its microbatches, on its work once a step, on the whole step."""

import numpy as np

from meshwright.arrays import Ints
from meshwright.cost.sustained import sustained_s
from meshwright.explain.alternatives.explanation import Effect
from meshwright.parallelism.subject.subject import Subject
from meshwright.pipeline.step_time import seconds_of, step_s
from meshwright.plans.records.record import MEMORY_ROLES
from meshwright.plans.stage import EXCHANGED

_PARAMETERS = MEMORY_ROLES.index("parameters")


class Effects:
    """Effects of choices in one stage.

    Args:
        subject: The stage.
    """

    def __init__(self, subject: Subject):
        plan, stage = subject.plan, subject.stage
        assert stage is not None and plan.pipeline is not None and subject.number is not None
        self.subject, self.stage, self.number, self.pipeline = subject, stage, subject.number, plan.pipeline
        self.problem = subject.record.problem
        self.times = [seconds_of(other) for other in plan.stages]
        self.step_s, self.busiest = step_s(self.pipeline, self.times)
        self._now = self._seconds(self.problem.choice)
        self.cost = self.problem.cost_of(self.problem.choice)
        # Recomputation, and interpolation between priced numbers of rows, lengthen a microbatch in proportion.
        self._longer = stage.microbatch_s / self._now[0] if self._now[0] > 0 else 1.0

    def of(self, choice: Ints) -> Effect:
        """The effect of a choice."""
        each, once = (a - b for a, b in zip(self._seconds(choice), self._now, strict=True))
        each *= self._longer
        times = list(self.times)
        now = times[self.number]
        times[self.number] = now._replace(own=now.own + each, once=now.once + once)
        return Effect(each, once, step_s(self.pipeline, times)[0] - self.step_s)

    def text(self) -> str:
        """The weight of a microbatch of the stage in the step, in words."""
        many = self.pipeline.num_microbatches
        if self.number == self.busiest:
            return f"the busiest stage: what a microbatch takes longer here, the step takes {many} times, once for each"
        return (
            f"stage {self.busiest} is busier: until this one is the busiest, what a microbatch takes longer here, the "
            "step takes once"
        )

    def _seconds(self, choice: Ints) -> tuple[float, float]:
        """Seconds of one microbatch, and of the work done once a step."""
        problem, program = self.problem, self.subject.record.program
        total = problem.cost_of(choice)
        at_end = dict(problem.once)
        once = sum(problem.nodes[node].num * float(cost[choice[node]]) for node, cost in problem.once)
        update = program.phases.index("update")
        for edge in problem.edges:
            phase = program.phase[edge.start[0]] if len(edge.start) else problem.nodes[edge.reader].phase
            ends = choice[edge.source], choice[edge.reader]
            if phase == update:
                once += edge.num * float(edge.matrix[ends])
            elif len(edge.offers) and edge.source in at_end:
                once -= edge.num * float(edge.joined[ends])
        at_once, with_each = self._exchanged(choice)
        return total - once + with_each, once + at_once

    def _exchanged(self, choice: Ints) -> tuple[float, float]:
        """Seconds of the replicas' exchange, once a step and per microbatch; it grows with their parameters."""
        mesh, problem = self.stage.mesh, self.problem
        if mesh.sizes[0] == 1 or not self.stage.backward.total_s:
            return 0.0, 0.0
        of_parameters = np.array(problem.role, np.int64)[problem.column] == _PARAMETERS
        chosen = [size[choice[c]] for c, size in zip(problem.column_class, problem.column_bytes, strict=True)]
        parameter_bytes = float((problem.share * np.array(chosen)[problem.column])[of_parameters].sum())
        size = parameter_bytes * (mesh.sizes[0] if self.subject.spread > 2 else 1)
        once, each = EXCHANGED[self.subject.spread]
        return self._sum(once, size), self._sum(each, size)

    def _sum(self, kinds: tuple[str, ...], size: float) -> float:
        return float(sum(sustained_s(self.stage.mesh, kind, (0,), size) for kind in kinds))
