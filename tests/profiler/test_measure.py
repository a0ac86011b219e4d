"""Timing with a clock that the programs themselves move, and once with a real one."""

from dataclasses import dataclass, field

import pytest

from meshwright.hardware.collectives import KINDS
from meshwright.profiler.measure import LEAST_S, MOST_ROUNDS, RUN_S, time_probes
from meshwright.profiler.probes import probes, views

from .surveys import MACHINE, replace_devices


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self):
        return self.now


@dataclass
class Fake:
    """A probe that takes a known time, and is disturbed by others now and then."""

    clock: Clock
    trip_s: float
    idle_s: float = 1e-3
    compile_s: float = 0.1
    disturbed: tuple[int, ...] = ()
    what: str = "launch"
    amount: float = 0.0
    dtype: str = "float32"
    size: int = 1
    across: bool = False
    unroll: int = 1
    flops: float = 0.0
    runs: list[int] = field(default_factory=list)

    def compile(self):
        self.clock.now += self.compile_s
        return self.run

    def run(self, trips):
        self.runs.append(trips)
        self.clock.now += self.idle_s + trips * self.trip_s * self.unroll
        if len(self.runs) in self.disturbed:
            self.clock.now += 0.1


def test_a_probe_takes_what_it_takes():
    clock = Clock()
    fakes = [Fake(clock, 1e-6), Fake(clock, 1e-3, idle_s=5e-3), Fake(clock, 0.1, unroll=4)]
    readings = time_probes(fakes, clock=clock)
    assert [r.seconds for r in readings] == [pytest.approx(f.trip_s) for f in fakes]


def test_runs_are_as_long_as_the_clock_needs_and_no_longer():
    clock = Clock()
    quick, slow, late = (Fake(clock, s, idle_s=i) for s, i in ((1e-5, 1e-4), (0.05, 1e-4), (1e-4, 0.02)))
    time_probes([quick, slow, late], clock=clock)
    assert max(quick.runs) * quick.trip_s == pytest.approx(RUN_S, rel=1)
    assert max(slow.runs) == 1
    assert max(late.runs) * late.trip_s > late.idle_s


def test_disturbed_runs_do_not_count():
    clock = Clock()
    fake = Fake(clock, 1e-4, disturbed=(2, 3, 4, 6, 9, 12, 14, 17, 20, 21))
    (reading,) = time_probes([fake], clock=clock)
    assert reading.seconds == pytest.approx(1e-4)
    assert reading.repeats > 1 and reading.rounds > 1


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_few_and_disturbed_rounds_still_give_a_figure(rounds):
    clock = Clock()
    fake = Fake(clock, 1e-4, disturbed=(3, 5, 7, 9))
    (reading,) = time_probes([fake], clock=clock, rounds=rounds)
    assert 1e-4 * 0.99 < reading.seconds < 0.2  # that of a disturbed run at worst


def test_what_cannot_be_told_from_nothing_is_not_free():
    clock = Clock()
    (reading,) = time_probes([Fake(clock, 0.0)], clock=clock)
    assert reading.seconds == LEAST_S


def test_a_slow_machine_leaves_out_what_matters_least():
    clock = Clock()
    readings = time_probes([Fake(clock, 1e-3, compile_s=2.0, amount=float(i)) for i in range(20)], clock=clock)
    assert [r.amount for r in readings] == list(range(len(readings))) and 4 <= len(readings) < 8
    assert clock.now < 20


def test_a_machine_that_takes_for_ever_is_asked_little():
    clock = Clock()
    readings = time_probes([Fake(clock, 0.5, idle_s=0.5, compile_s=3.0) for _ in range(20)], clock=clock)
    assert clock.now < 30 and all(r.rounds >= 2 for r in readings)


def test_rounds_end():
    clock, fake = Clock(), None
    fake = Fake(clock, 1e-3)
    time_probes([fake], clock=clock)
    assert len(fake.runs) < 3 * MOST_ROUNDS
    said = []
    time_probes([Fake(clock, 1e-3)], clock=clock, rounds=2, say=said.append)
    assert said[0].startswith("compiling 1 of 1") and said[-1].endswith("round 2 of 2")


@pytest.mark.parametrize("processes, devices", [(1, 1), (1, 2), (1, 3), (1, 6), (1, 8), (2, 1), (2, 4), (4, 8), (6, 3)])
def test_views_hold_all_devices_in_groups_of_several(processes, devices):
    found = views(processes, devices)
    for (outer, size, inner), across in found:
        assert outer * size * inner == processes * devices and size > 1
        assert across == (inner * size > devices or (inner == devices and processes > 1))
    assert len(set(found)) == len(found)
    assert any(across for _, across in found) == (processes > 1)
    assert any(not across for _, across in found) == (devices > 1)


def test_one_device_has_no_collectives_to_time():
    assert {p.what for p in probes(replace_devices(MACHINE, 1))} == {"launch", "memory", "special", "matmul", "window"}


def test_probes_cut_evenly_whatever_the_number_of_devices():
    for probe in probes(replace_devices(MACHINE, 6)):
        length = len(probe.arrays()[0])
        assert probe.what not in KINDS or (length % probe.size == 0 and length > 0)
