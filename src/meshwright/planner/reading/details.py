"""The details of a new plan, derived from the solved problem when they are first needed."""

from dataclasses import dataclass
from functools import cached_property

from meshwright.parallelism.judge import judge_plan
from meshwright.parallelism.subject.subject import facts_of
from meshwright.planner.reading.operations import OpPlans
from meshwright.planner.reading.readback import Readback
from meshwright.planner.reading.record import make_record
from meshwright.plans.plan import Collective, OpPlan, PlanData
from meshwright.plans.records.judgement import Judgement
from meshwright.plans.records.record import Record
from meshwright.program.program import Program
from meshwright.program.text import program_form


@dataclass(frozen=True)
class FreshDetails:
    """See `Details`.

    Attributes:
        back: The choice that is read off.
        program: What was planned: the function as it is changed by recomputation and microbatches.
    """

    back: Readback
    program: Program

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every communication of the plan, in the order of the operations."""
        return self.back.collectives

    @cached_property
    def ops(self) -> tuple[OpPlan, ...]:
        """How every operation that belongs to a group is split, in program order."""
        return OpPlans(self.back).all()

    def make_record(self, limit: float | None) -> Record:
        """See `Details`."""
        return make_record(self.back, limit)

    def make_judgement(self, plan: PlanData) -> Judgement:
        """See `Details`."""
        assert isinstance(plan.record, Record)
        return judge_plan(plan, facts_of(plan, plan.record.program))

    def make_form(self, plan: PlanData) -> str:
        """See `Details`."""
        return program_form(self.program)
