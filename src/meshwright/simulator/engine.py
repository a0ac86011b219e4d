"""The event engine: every stage runs its row of the schedule in order, waits for its inputs, and is timed.

Devices of one stage do the same at the same time, so a class of devices is simulated once, however many they are. A
pass over one chunk is run on the lanes of one device (`lanes.run`) once for each kind of pass; the schedule then places
tens of thousands of passes in time.
"""

from dataclasses import dataclass

from meshwright.schedules import Rows, Step, table
from meshwright.schedules.base import BACKWARD, FORWARD, WEIGHTS
from meshwright.simulator.lanes import Run, run
from meshwright.simulator.simulated_step import Pass, StageRun
from meshwright.simulator.simulation import Simulation
from meshwright.simulator.work import Chunk, Tasks, Work


def simulate_work(work: Work) -> Simulation:
    """Simulates one step."""
    return _Engine(work).simulate()


@dataclass(slots=True)
class _Stage:
    """One stage on its way through its row."""

    row: tuple[Step, ...]
    place: int = 0
    free_s: float = 0.0  # when it has finished the steps that it began
    exchanged_s: float = 0.0  # when the gradients that it began to send are there


class _Engine:
    def __init__(self, work: Work):
        self.work = work
        self.num_chunks = len(work.chunks)
        self._runs: dict[int, Run] = {}
        self.apart = False  # whether weights' gradients are steps of their own
        self.arrived: dict[tuple[str, int, int], float] = {}  # what, microbatch, virtual stage: when its input is there
        self.sent_s = [[0.0, 0.0] for _ in range(work.num_stages)]  # until when each stage sends on and back
        self.passes: list[list[Pass]] = [[] for _ in range(work.num_stages)]

    def simulate(self) -> Simulation:
        work = self.work
        rows = table(work.schedule, work.num_stages, work.num_microbatches, work.interleave)
        self.apart = any(step.work == WEIGHTS for step in rows[0])
        stages = self._work_off(rows)
        # Gradients' norms are exchanged before anyone updates, so all stages update together.
        begin_s = max(max(stage.free_s, stage.exchanged_s) for stage in stages)
        updates = tuple(self._run(tasks) for tasks in work.update)
        step_s = begin_s + max(update.end_s for update in updates) + work.fixed_s
        runs = tuple(
            StageRun(tuple(passes), stage.free_s, begin_s, update)
            for passes, stage, update in zip(self.passes, stages, updates, strict=True)
        )
        return Simulation(work, step_s, runs)

    def _work_off(self, rows: Rows) -> list[_Stage]:
        stages = [_Stage(row) for row in rows]
        last = [self._last_steps(row) for row in rows]
        waiting = list(range(len(stages)))
        while waiting:
            index = waiting.pop()
            stage = stages[index]
            while stage.place < len(stage.row):
                step = stage.row[stage.place]
                ready = self._ready_s(step, index)
                if ready is None:
                    break
                self._do(stage, index, step, ready, closing=(step.chunk, stage.place) in last[index])
                stage.place += 1
                waiting += self._woken(step, index)
        stuck = [s.row[s.place] for s in stages if s.place < len(s.row)]
        assert not stuck, f"a schedule that waits for ever, at {stuck[0]}"
        return stages

    def _last_steps(self, row: tuple[Step, ...]) -> set[tuple[int, int]]:
        """For each chunk, the place of the last step that makes weights' gradients."""
        kind = WEIGHTS if self.apart else BACKWARD
        found = {step.chunk: place for place, step in enumerate(row) if step.work == kind}
        return set(found.items())

    def _ready_s(self, step: Step, stage: int) -> float | None:
        """When a step's input has arrived; None if it has not."""
        virtual = step.chunk * self.work.num_stages + stage
        if step.work == WEIGHTS or (step.work == FORWARD and virtual == 0):
            return 0.0
        if step.work == BACKWARD and virtual == self.num_chunks - 1:
            return 0.0
        return self.arrived.get((step.work, step.microbatch, virtual))

    def _do(self, stage: _Stage, index: int, step: Step, ready: float, closing: bool) -> None:
        virtual = step.chunk * self.work.num_stages + index
        chunk = self.work.chunks[virtual]
        done = self._run(self._tasks(chunk, step.work, closing))
        start = max(stage.free_s, ready)
        if closing:
            # Transfers of an earlier chunk go first.
            behind = max(0.0, stage.exchanged_s - start)
            stage.exchanged_s = start + done.end_s + (behind if done.end_s > done.own_s else 0.0)
            stage.free_s = start + done.own_s
        else:
            stage.free_s = start + done.end_s
        self.passes[index].append(Pass(step, start, stage.free_s, done, ready))
        if step.work == WEIGHTS:
            return
        ahead = step.work == FORWARD
        target = virtual + (1 if ahead else -1)
        if 0 <= target < self.num_chunks:
            begin = max(stage.free_s, self.sent_s[index][ahead])
            self.sent_s[index][ahead] = begin + self.work.send_s(virtual, target)
            self.arrived[step.work, step.microbatch, target] = self.sent_s[index][ahead]

    def _tasks(self, chunk: Chunk, work: str, closing: bool) -> Tasks:
        if work == FORWARD:
            return chunk.forward
        if work == WEIGHTS:
            return chunk.closing_weights if closing else chunk.weights
        if self.apart:
            return chunk.inputs
        return chunk.closing if closing else chunk.backward

    def _woken(self, step: Step, stage: int) -> list[int]:
        """The stage that waits for a step's result."""
        if step.work == WEIGHTS or self.work.num_stages == 1:
            return []
        return [(stage + (1 if step.work == FORWARD else -1)) % self.work.num_stages]

    def _run(self, tasks: Tasks) -> Run:
        key = id(tasks)
        if key not in self._runs:
            self._runs[key] = run(tasks, self.work.contention)
        return self._runs[key]
