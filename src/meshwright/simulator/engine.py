"""The event engine: every stage carries out its list of instructions in order, waits for its inputs, and is timed.

The lists are those of the runtime (`schedules.instructions`). Devices of one stage do the same at the same time, so a
class of devices is simulated once, however many they are. A pass over one chunk is run on the lanes of one device
(`lanes.run`) once for each kind of pass; the instructions then place tens of thousands of passes in time.
"""

from dataclasses import dataclass, field

from meshwright.schedules import Step
from meshwright.schedules.base import BACKWARD, FORWARD, WEIGHTS
from meshwright.schedules.instructions import FREE, PARAMETERS, RECEIVE, RUN, SEND, UPDATE, Instruction, message
from meshwright.simulator.lanes import Timeline, run
from meshwright.simulator.simulated_step import Pass, Sent, StageRun
from meshwright.simulator.simulation import Simulation
from meshwright.simulator.work import Tasks, Work


def simulate_work(work: Work) -> Simulation:
    """Simulates one step."""
    return _Engine(work).simulate()


@dataclass(slots=True)
class _Stage:
    """One stage on its way through its instructions."""

    own: tuple[Instruction, ...]
    place: int = 0
    free_s: float = 0.0  # when it has finished the passes that it began
    ready_s: float = 0.0  # when the inputs of the next pass have arrived
    exchanged_s: float = 0.0  # when the gradients that it began to send are there
    sent_s: dict[bool, float] = field(default_factory=dict)  # until when it sends on, and back
    passes: list[Pass] = field(default_factory=list)
    sends: list[Sent] = field(default_factory=list)
    frees: list[tuple[float, int]] = field(default_factory=list)  # when the activations of a chunk are freed


class _Engine:
    def __init__(self, work: Work):
        self.work = work
        self._runs: dict[int, Timeline] = {}
        self.stages = [_Stage(instructions) for instructions in work.instructions]
        self.apart = any(one.work == WEIGHTS for one in self.stages[0].own)  # weights' gradients are passes apart
        self.arrived: dict[tuple, float] = {}  # when a message is there

    def simulate(self) -> Simulation:
        work, stages = self.work, self.stages
        self._work_off()
        # Gradients' norms are exchanged before anyone updates, so all stages update together.
        begin_s = max(max(stage.free_s, stage.exchanged_s) for stage in stages)
        updates = tuple(self._run(tasks) for tasks in work.update)
        step_s = begin_s + max(update.end_s for update in updates) + work.fixed_s
        runs = tuple(
            StageRun(tuple(s.passes), s.free_s, begin_s, update, tuple(s.sends), tuple(s.frees))
            for s, update in zip(stages, updates, strict=True)
        )
        return Simulation(work, step_s, runs)

    def _work_off(self) -> None:
        """Carries out all instructions before the update."""
        last = [self._last_passes(stage.own) for stage in self.stages]
        waiting = list(range(len(self.stages)))
        while waiting:
            index = waiting.pop()
            stage = self.stages[index]
            while stage.place < len(stage.own) and stage.own[stage.place].do != UPDATE:
                one = stage.own[stage.place]
                if one.do == RECEIVE:
                    when = self.arrived.get(message(one, index))
                    if when is None:
                        break
                    stage.ready_s = max(stage.ready_s, when)
                elif one.do == SEND:
                    self._send(stage, index, one)
                    waiting.append(one.peer)
                elif one.do == RUN:
                    self._pass(stage, one, closing=stage.place in last[index])
                elif one.do == FREE:
                    stage.frees.append((stage.free_s, one.chunk))
                stage.place += 1
        stuck = [s.own[s.place] for s in self.stages if s.place < len(s.own) and s.own[s.place].do != UPDATE]
        assert not stuck, f"a schedule that waits for ever, at {stuck[0]}"

    def _last_passes(self, own: tuple[Instruction, ...]) -> set[int]:
        """For each chunk, the place of the last pass that makes weights' gradients."""
        kind = WEIGHTS if self.apart else BACKWARD
        return set({one.chunk: place for place, one in enumerate(own) if one.do == RUN and one.work == kind}.values())

    def _pass(self, stage: _Stage, one: Instruction, closing: bool) -> None:
        done = self._run(self._tasks(one, closing))
        start, ready = max(stage.free_s, stage.ready_s), stage.ready_s
        if closing:
            # Transfers of an earlier chunk go first.
            behind = max(0.0, stage.exchanged_s - start)
            stage.exchanged_s = start + done.end_s + (behind if done.end_s > done.own_s else 0.0)
            stage.free_s = start + done.own_s
        else:
            stage.free_s = start + done.end_s
        step = Step(one.work, one.microbatch, one.chunk // self.work.num_stages)
        stage.passes.append(Pass(step, start, stage.free_s, done, ready))
        stage.ready_s = 0.0

    def _send(self, stage: _Stage, index: int, one: Instruction) -> None:
        """Sends in the background; values that go the same way leave one after another."""
        if one.work == PARAMETERS:  # they are sent with their gradients' sums, whose time a stage's update includes
            self.arrived[message(one, index)] = 0.0
            return
        ahead = one.target[1] > one.chunk
        begin = max(stage.free_s, stage.sent_s.get(ahead, 0.0))
        end = begin + self.work.send_s(one.chunk, one.target[1])
        stage.sent_s[ahead] = self.arrived[message(one, index)] = end
        stage.sends.append(Sent(one, begin, end))

    def _tasks(self, one: Instruction, closing: bool) -> Tasks:
        chunk = self.work.chunks[one.chunk]
        if one.work == FORWARD:
            return chunk.forward
        if one.work == WEIGHTS and one.chunk > 0:
            return chunk.closing_weights if closing else chunk.weights
        if one.work == BACKWARD and self.apart:
            return chunk.inputs
        return chunk.closing if closing else chunk.backward

    def _run(self, tasks: Tasks) -> Timeline:
        key = id(tasks)
        if key not in self._runs:
            self._runs[key] = run(tasks, self.work.contention)
        return self._runs[key]
