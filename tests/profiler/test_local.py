"""`mw.cluster("local")`: measured once, kept, told from the catalogue, and the same for every plan."""

import logging
import sys

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.hardware.load import local_cluster
from meshwright.profiler import known_survey, local
from meshwright.profiler import measure as measure_module
from meshwright.profiler.database import survey_path
from meshwright.profiler.local import measured_cluster
from meshwright.profiler.probes import Sizes, probes
from meshwright.profiler.survey import this_machine

from .surveys import ALPHA_S, BETA_S, KINDS, collectives, compute, survey


class Measurer:
    """Stands for the real one and counts how often it is asked."""

    def __init__(self):
        self.calls = 0

    def __call__(self, machine, say):
        self.calls += 1
        say("something")
        return survey(
            machine=machine, readings=[*compute(launch_s=1e-6 * self.calls), *collectives(8), *collectives(2)]
        )


@pytest.fixture
def measurer(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("MESHWRIGHT_MEASURE", "once")
    monkeypatch.setattr(local, "_known", {})
    fake = Measurer()
    monkeypatch.setattr(measure_module, "measure", fake)
    return fake


def forget(monkeypatch):
    """As if the program were started anew."""
    monkeypatch.setattr(local, "_known", {})


def step(w, x):
    value, grad = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
    return w - grad, value


ARGS = (np.ones((64, 64), np.float32), np.ones((128, 64), np.float32))


def test_the_machine_is_measured_once(measurer, monkeypatch):
    first = mw.cluster("local")
    assert first == mw.cluster(" Local ") and measurer.calls == 1
    forget(monkeypatch)
    assert mw.cluster("local") == first and measurer.calls == 1


def test_it_is_measured_again_when_asked(measurer, monkeypatch):
    first = mw.cluster("local")
    again = mw.cluster("local", remeasure=True)
    assert measurer.calls == 2 and again.chip.launch_s == 2 * first.chip.launch_s
    assert mw.cluster("local") == again
    forget(monkeypatch)
    assert mw.cluster("local") == again and measurer.calls == 2


def test_the_environment_can_ask_for_it_or_forbid_it(measurer, monkeypatch):
    mw.cluster("local")
    forget(monkeypatch)
    monkeypatch.setenv("MESHWRIGHT_MEASURE", "always")
    mw.cluster("local")
    assert mw.cluster("local").chip.launch_s == 2e-6 and measurer.calls == 2  # but once in a process
    monkeypatch.setenv("MESHWRIGHT_MEASURE", "never")
    assert mw.cluster("local") == local_cluster()
    assert mw.cluster("local", remeasure=True).chip.launch_s == 3e-6
    monkeypatch.setenv("MESHWRIGHT_MEASURE", "sometimes")
    with pytest.raises(mw.ClusterError, match=r"MESHWRIGHT_MEASURE is 'sometimes'.*once, always, never"):
        mw.cluster("local")


def test_a_damaged_file_is_measured_anew(measurer, monkeypatch, tmp_path):
    mw.cluster("local")
    path = survey_path(tmp_path, this_machine())
    path.write_text("{")
    forget(monkeypatch)
    mw.cluster("local")
    assert measurer.calls == 2 and path.read_text() != "{"


def test_a_folder_that_cannot_be_written_costs_only_the_file(measurer, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "file"))
    first = mw.cluster("local")
    assert mw.cluster("local") == first and measurer.calls == 1


def test_a_measurement_that_fails_leaves_the_catalogue(measurer, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("the devices are on fire")

    monkeypatch.setattr(measure_module, "measure", fail)
    with caplog.at_level(logging.WARNING):
        assert mw.cluster("local") == local_cluster() == mw.cluster("local")
    assert caplog.text.count("on fire") == 1


def test_only_local_can_be_measured(measurer):
    with pytest.raises(mw.ClusterError, match="only 'local' can be measured, not '8 h100'"):
        mw.cluster("8 h100", remeasure=True)
    assert mw.cluster("8 h100").num_devices == 8 and measurer.calls == 0


def test_collectives_cost_what_was_measured(measurer):
    mesh = mw.cluster("local").mesh((2, 4))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"):
        for axes in ((0,), (1,), (0, 1)):
            assert mesh.collective_s(kind, axes, 1e6) == pytest.approx(ALPHA_S + BETA_S * 1e6)


def test_one_device_needs_no_collectives(measurer):
    base = mw.cluster("1x1 cpu")
    machine = measured_cluster(base, survey(compute()))
    plan = mw.plan(step, *ARGS, cluster=machine)
    assert plan.cost.communication == 0 and plan.cost.compute > 0


def test_what_found_no_time_inside_processes_is_priced_as_across(measurer):
    machine = measured_cluster(mw.cluster("2x4 cpu"), survey([*compute(), *collectives(8, across=True)]))
    inside, across = (machine.mesh((2, 4)).collective_s("all_reduce", (axis,), 1e6) for axis in (1, 0))
    assert inside == across == pytest.approx(ALPHA_S + BETA_S * 1e6)


def test_a_plan_says_that_its_costs_are_measured(measurer, tmp_path):
    plan = mw.plan(step, *ARGS, cluster="local")
    assert plan.provenance["costs"].startswith(f"measured on {this_machine().host}, 2026-01-02")
    plan.save(tmp_path / "plan.json")
    again = mw.Plan.load(tmp_path / "plan.json")
    assert again.mesh == plan.mesh and again.mesh.cluster.known == plan.mesh.cluster.known
    assert mw.plan(step, *ARGS, cluster="8 h100").provenance["costs"].startswith("modelled: catalogue figures")


def test_two_plans_with_one_file_are_equal(measurer, monkeypatch, tmp_path):
    for name in ("one.json", "two.json"):
        forget(monkeypatch)
        mw.plan(step, *ARGS).save(tmp_path / name)
    one, two = ((tmp_path / name).read_text() for name in ("one.json", "two.json"))
    strip = lambda text: [line for line in text.splitlines() if "seconds" not in line]  # noqa: E731
    assert strip(one) == strip(two) and measurer.calls == 1


def test_a_plan_for_the_measured_machine_runs_here(measurer):
    run = mw.parallelize(step)
    _, value = run(*ARGS)
    expected = step(*ARGS)
    np.testing.assert_allclose(value, expected[1], rtol=1e-5)
    assert run.last_plan.provenance["costs"].startswith("measured")


def test_progress_is_said_on_a_terminal_only(measurer, monkeypatch, capsys):
    mw.cluster("local")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    mw.cluster("local", remeasure=True)
    out, err = capsys.readouterr()
    assert out == "" and "measuring this machine" in err


def test_what_is_known_can_be_looked_at(measurer):
    assert known_survey().machine == this_machine() and known_survey() is known_survey()


def test_describing_another_cluster_measures_nothing_and_loads_no_jax():
    import subprocess

    code = "import sys, meshwright as mw; mw.cluster('8 h100'); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def few_probes(machine):
    """One small probe of each kind."""
    sizes = Sizes((16,), (2**10,), (2**10, 2**12), (1, 8), 1)
    return list({p.what: p for p in reversed(probes(machine, sizes))}.values())


def test_this_machine_is_really_measured_and_then_known(tmp_path, monkeypatch):
    """The one measurement with a real clock: so small that only its form can be looked at."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("MESHWRIGHT_MEASURE", "once")
    forget(monkeypatch)
    monkeypatch.setattr(measure_module, "probes", few_probes)
    monkeypatch.setattr(measure_module, "MOST_TRIPS", 2)
    monkeypatch.setattr(measure_module, "COMPILE_S", 600.0)  # a slow machine compiles every kind, too
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    with jax.set_mesh(mesh), jax.transfer_guard("disallow"), jax.disable_jit():  # no business of ours
        machine = mw.cluster("local")
    found = known_survey()
    assert {r.what for r in found.readings} == {"launch", "memory", "special", "matmul", "window", *KINDS}
    assert all(r.seconds > 0 and r.amount >= 0 for r in found.readings)
    assert machine.memory_bytes > 0 and machine.chip.memory_bandwidth > 0 and machine.chip.peak_flops("float32") > 0
    forget(monkeypatch)
    monkeypatch.setattr(measure_module, "measure", None)  # calling it would fail
    assert mw.cluster("local") == machine and known_survey() == found
