"""The Plan that users hold: plan data, with everything that can be done with it.

The functions that explain, report, simulate or verify a plan take plain `PlanData`, and each is loaded on first use. No
module below imports this one.
"""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from meshwright.errors import ShardingError
from meshwright.names import one_line
from meshwright.plans.plan import PlanData
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.explain.alternatives.explanation import Explanation
    from meshwright.explain.show.decisions import Decisions
    from meshwright.explain.show.diff import Difference
    from meshwright.explain.show.tensor_table import TensorTable
    from meshwright.hardware import Cluster
    from meshwright.plans.trust import Trust
    from meshwright.rehearsal.rehearsal import Rehearsal
    from meshwright.rehearsal.stages import PipelineRehearsal
    from meshwright.runtime.checking.verify import Verification
    from meshwright.runtime.checking.verify_stages import PipelineVerification
    from meshwright.runtime.stages.recording import Event
    from meshwright.schedules.instructions import Instruction
    from meshwright.simulator.simulation import Simulation


class Plan(PlanData):
    """A plan: its decisions, its predicted costs, and the methods to explain, show, simulate and check them.

    Examples:
        >>> import jax.numpy as jnp, meshwright as mw
        >>> mesh = mw.Mesh.abstract((4,), alpha=(1,), beta=(1,))
        >>> plan = mw.plan(lambda x, w: x @ w, jnp.ones((8, 4)), jnp.ones((4, 4)), mesh=mesh)
        >>> plan.mesh.shape, str(plan.solution.status)
        ({'x': 4}, 'optimal')
    """

    @classmethod
    def of(cls, data: PlanData) -> "Plan":
        """The plan of plain data."""
        return data if isinstance(data, cls) else cls(**{f.name: getattr(data, f.name) for f in fields(data)})

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads a plan that `save` wrote."""
        from meshwright.plan_files.storage import load_plan

        return cls.of(load_plan(Path(path)))

    def save(self, path: str | Path) -> None:
        """Writes the plan as versioned JSON."""
        from meshwright.plan_files.storage import save_plan

        save_plan(self, Path(path))

    def show(self, path: str = "*") -> "TensorTable":
        """A table of the tensors that a path or a glob matches: shape, sharding, bytes per device, kind. Print it."""
        from meshwright.explain.show.tensor_table import show

        return show(self, path)

    @overload
    def explain(self) -> "Decisions": ...

    @overload
    def explain(self, path: str, seconds: float = 0.2) -> "Explanation": ...

    def explain(self, path: str | None = None, seconds: float = 0.2) -> "Explanation | Decisions":
        """Why an argument or result is split as it is, and what else would cost; or what the whole step's decisions do.

        Args:
            path: Of one tensor; None for microbatches, recomputation, stages and the splits together, each beside the
                quickest plan that the search made and that decides it otherwise.
            seconds: Time to solve again. An alternative that cannot be solved in it is bounded, or counted only.

        Returns:
            What can be printed: of a tensor the runner-ups, each at the cost of the best plan that has it, and what
            forced the choice.
        """
        if path is None:
            from meshwright.explain.show.decisions import decisions

            return decisions(self)
        from meshwright.explain.alternatives.why import explain

        return explain(self, path, seconds)

    def diff(self, other: PlanData) -> "Difference":
        """The differences from another plan: verdict, costs, memory, shardings, communication. Print it."""
        from meshwright.explain.show.diff import diff

        return diff(self, _checked(other))

    def report(
        self,
        path: str | Path,
        other: PlanData | None = None,
        seconds: float = 20.0,
        *,
        recorded: "Sequence[Event]" = (),
    ) -> None:
        """Writes one self-contained web page about the plan; with another plan, about both, side by side.

        Args:
            path: The page.
            other: Another plan.
            seconds: Time for the page, most of which goes to solving for alternatives. An alternative that
                cannot be solved in it is bounded. With 0 the page has no alternatives.
            recorded: What happened in a real step of a plan in stages, which the page shows under the simulated one:
                ``.events`` of what `step.trace` returns.
        """
        from meshwright.report.page import write_report

        write_report(self, Path(path), None if other is None else _checked(other), seconds, recorded)

    def dump(self, folder: str | Path, function: Any = None, *args: Any) -> None:
        """Writes everything there is to know about the plan into a folder.

        Args:
            folder: The folder; it is made where there is none.
            function: The function and its arguments or their types, to compile it; a fresh plan knows them.
            *args: See there.
        """
        from meshwright.export.dump import dump

        dump(self, Path(folder), function, args)

    def export(self, to: str = "jax", path: str | Path = "sharding_plan.py") -> Path:
        """Writes the plan for code that does not use Meshwright: one Python file, which needs JAX alone.

        The file holds the mesh, a ``PartitionSpec`` for every parameter by its path, those of activations by scope, the
        microbatches, what is recomputed and XLA's options, and the few functions that apply them.

        Args:
            to: What the code is written in: ``"jax"``.
            path: The file.

        Returns:
            The file.

        Raises:
            OutputError: The plan is a pipeline, which is several programs; or the file cannot be written.
        """
        from meshwright.export.jax_file import export

        export(self, to, Path(path))
        return Path(path)

    @property
    def trust(self) -> "Trust | None":
        """How far its step may be from a measured one; None on abstract meshes and CPUs, and for stages; print it."""
        from meshwright.plans.trust import trust_of  # here, so that a plan is read without NumPy

        return trust_of(self)

    def simulate(self, cluster: "Cluster | str | None" = None) -> "Simulation":
        """Simulates one step, event by event: see `mw.simulate`."""
        from meshwright.simulator.simulate import simulate

        return simulate(self, cluster)

    def instructions(self, stage: int) -> "tuple[Instruction, ...]":
        """What a stage of a pipeline does in a step, in order; print them.

        Args:
            stage: The number of the stage, counted from 0.

        Raises:
            ShardingError: The plan has no such stage.
        """
        from meshwright.plans.stage_instructions import stage_instructions

        lists = stage_instructions(self)
        if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < len(lists):
            raise ShardingError(f"stage is {stage!r}; the plan has stages 0 to {len(lists) - 1}")
        return lists[stage]

    def verify(
        self,
        function: Any = None,
        *args: Any,
        devices: "Sequence[Any] | None" = None,
        compiler_options: "Mapping[str, Any] | None" = None,
    ) -> "Verification | PipelineVerification":
        """Compiles the program, or the programs of all stages, and compares the plan with XLA's result.

        Args:
            function: The function that the plan is for, and its arguments or their types; a fresh plan knows them.
            *args: See there.
            devices: Devices to compile for, as many as the mesh has: those of this process by default, or those of a
                machine that is not there (`jax.experimental.topologies`).
            compiler_options: XLA's options by name.

        Returns:
            Collectives by kind and axes, memory and flops, planned and compiled, and on accelerators which collectives
            run beside compute; of a pipeline those of each stage, and what stages send each other. `rematerialized`
            lists the values that XLA gathers whole because it knows no better way to reshard them. Print it.
        """
        from meshwright.runtime.checking.verify import verify
        from meshwright.simulator.hidden import hidden_bytes

        hidden = None if self.stages or self.mesh.is_abstract else hidden_bytes(self)
        return verify(self, function, args, devices, compiler_options, hidden)

    def rehearse(
        self, function: Any = None, *args: Any, device: Any = None, steps: int = 10, segments: bool = True
    ) -> "Rehearsal | PipelineRehearsal":
        """Runs one device's share of the plan on one device, and prices the plan with what was measured.

        Every operation runs at the shapes that it has on one device of the plan, in one compiled program; each
        collective is replaced by a stand-in that makes a value of the same shape. So one accelerator measures compute
        and memory of a plan for a thousand. Of a pipeline every different program of the stages runs, and the schedule
        is simulated with the measured times.

        Args:
            function: The function that the plan is for, and its arguments or their types; a fresh plan knows them. Of
                arrays the share of the first device is used; for types, values are drawn.
            *args: See there.
            device: The device to run on; the first one of this process by default.
            steps: How many steps to time in each of three rounds; with 0 the share is only compiled.
            segments: Whether to measure the repeated parts of the program by themselves, too: what was measured is
                kept, and used by `mw.Auto(profile=True)`.

        Returns:
            Measured compute, modelled communication, memory and FLOPs. Print it.

        Raises:
            ShardingError: The plan was loaded and no function is given.
        """
        from meshwright.rehearsal.rehearsal import rehearse

        return rehearse(self, function, args, device, steps, segments)

    def __eq__(self, other: object) -> bool:
        from meshwright.plan_files.storage import comparable

        return comparable(self) == comparable(other) if isinstance(other, PlanData) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # plans hold dicts

    def __repr__(self) -> str:
        from meshwright.plans.text import axes_text, cost_text

        where = "" if self.mesh.cluster is None else f" of {one_line(self.mesh.cluster.name)}"
        step, peak = cost_text(self, self.step_s), format_bytes(self.memory.peak_bytes)
        return f"<Plan: {self.method} on mesh {axes_text(self)}{where}, step {step}, {peak} per device>"

    def __str__(self) -> str:
        from meshwright.explain.show.plan_text import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from meshwright.report.page import notebook_html

        return notebook_html(self)


def _checked(other: Any) -> PlanData:
    if not isinstance(other, PlanData):
        raise ShardingError(f"{other!r:.60} is no plan to compare with; give one that mw.plan or mw.Plan.load returned")
    return other
