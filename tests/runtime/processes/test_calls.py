"""Turns: what one process calls and another does not shows, and nothing shows while one is only slower."""

import json

import pytest

from meshwright.runtime.processes.calls import Turns

pytestmark = pytest.mark.devices

X4, X8 = {"x": "float32[4]"}, {"x": "float32[8]"}


class Two:
    """Process 0 and process 1, and what they tell each other."""

    def __init__(self):
        self.turns = Turns(0, [1]), Turns(1, [0])

    def call(self, process, name, types, times=1):
        for _ in range(times):
            self.turns[process].num_calls += 1
            self._tell(process, self.turns[process].take(name, types))

    def do_next(self, process, name):
        self._tell(process, self.turns[process].take(name, {}, is_next=True))

    def _tell(self, process, message):
        if message is not None:
            self.turns[1 - process].hear(process, json.loads(json.dumps(message)))

    def differ(self, process, stuck_at=0):
        return self.turns[process].differ(stuck_at=stuck_at)


def test_equal_calls_agree_and_say_only_what_is_new():
    two = Two()
    for process in (0, 1):
        two.call(process, "step", X4, times=5)
        two.call(process, "evaluate", X8)
        two.call(process, "step", X4)
    assert two.differ(0) is two.differ(1) is None
    two.turns[0].num_calls += 1
    assert two.turns[0].take("step", X4) is None, "a call like the last one is not told"
    two.turns[0].num_calls += 1
    assert two.turns[0].take("evaluate", X8) == [9, 1], "what was told before has a number"


def test_a_process_that_is_behind_may_catch_up():
    two = Two()
    two.call(0, "step", X4, times=3)
    two.call(0, "evaluate", X8)
    two.call(1, "step", X4, times=2)
    assert two.differ(1) is two.differ(1, stuck_at=2) is None
    two.call(1, "step", X4)
    assert two.differ(1, stuck_at=3) is None
    two.call(1, "evaluate", X8)
    assert two.differ(1) is two.differ(0) is None


def test_other_types_in_one_process_show():
    two = Two()
    for process in (0, 1):
        two.call(process, "step", X4, times=3)
    two.call(1, "step", X8)
    two.call(0, "step", X4)
    assert two.differ(0) is None, "it may be about to say that it turned, too"
    said = "process 1 calls step with x as float32[8] (call 4), and process 0 with x as float32[4]"
    assert two.differ(0, stuck_at=4) == said
    two.call(0, "step", X4)
    assert two.differ(0) == said, "it is past that call"


def test_another_function_or_another_number_of_calls_shows():
    two = Two()
    two.call(0, "step", X4, times=3)
    two.call(0, "evaluate", X4)
    two.call(1, "step", X4, times=2)
    two.call(1, "evaluate", X4)
    assert two.differ(0) == (
        "process 1 calls evaluate as its call 3 of a parallelised function, and process 0 as its call 4"
    )
    two = Two()
    two.call(0, "step", X4)
    two.call(1, "evaluate", X4)
    assert "process 0 calls step as its call 1" in two.differ(1)


def test_an_end_shows_where_others_go_on():
    two = Two()
    for process in (0, 1):
        two.call(process, "step", X4, times=2)
    two.turns[0].end(1, 2)
    assert two.differ(0) is None
    two.do_next(0, "mw.batches for step")
    assert two.differ(0) == (
        "process 1 ended after 2 calls of parallelised functions, and process 0 continues with mw.batches for step"
    )
    two.call(0, "step", X4)
    assert two.differ(0).endswith("process 0 continues with step")


def test_processes_may_end_after_planning_without_a_call():
    two = Two()
    for process in (0, 1):
        two.do_next(process, "the planning of step")
    two.turns[0].end(1, 0)
    assert two.differ(0) is None
    two.do_next(0, "the planning of evaluate")
    assert "process 1 ended after 0 calls" in two.differ(0)
