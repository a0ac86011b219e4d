"""Efficiencies of classes of operations are learned from measured parts, and correct the model on that chip alone."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.profiler.measurements import (
    Key,
    export_json,
    import_json,
    measured_now,
    open_database,
    this_compiler,
)
from meshwright.profiler.measurements.database import DatabaseError
from meshwright.rehearsal.learning import class_probes
from meshwright.rehearsal.learning.calibration import (
    CLASSES,
    WORK,
    calibrated,
    efficiencies,
    figures_digest,
    fitted,
    keep_work,
    modelled_by_class,
)
from meshwright.rehearsal.learning.from_parts import Measured
from meshwright.rehearsal.measuring import Candidate
from meshwright.rehearsal.parts import parts_of
from tests.rehearsal.share.test_program import step, weights

ARGS = (
    jax.eval_shape(weights),
    jax.ShapeDtypeStruct((16384, 16), "float32"),
)  # elementwise work takes as long as products


@pytest.fixture(scope="module")
def plan():
    return mw.plan(step, *ARGS, cluster="1x1 cpu", mesh=(1,))


@pytest.fixture
def database(tmp_path):
    with open_database(tmp_path / "measurements.sqlite") as found:
        yield found


def measured(plan, factors):
    """The parts of a plan as if classes of operations took some times as long as the model says."""
    for part in parts_of(plan, plan.origin.graph):
        by_class = modelled_by_class(plan, plan.origin.graph, part.operations, plan.mesh.chip)
        assert sum(by_class.values()) == pytest.approx(part.modelled_s)
        seconds = sum(factors.get(name, 1.0) * s for name, s in by_class.items())
        key = Candidate(plan, plan.origin, part).key(jax.devices()[0])
        yield Measured(plan, part, measured_now(key, "rehearsed", seconds))


def test_factors_are_learned_and_correct_the_model(plan, database):
    small = mw.plan(step, ARGS[0], jax.ShapeDtypeStruct((64, 16), "float32"), cluster="1x1 cpu", mesh=(1,))
    for one in (plan, small):  # of which one is full of elementwise work, the other of products
        keep_work(database, measured(one, {"small product": 2.0}), one.origin.graph)
    found = efficiencies(database, plan.mesh.chip)
    assert found == pytest.approx({"small product": 2.0, "elementwise": 1.0}, rel=0.1)
    corrected = calibrated(plan.origin.graph, plan.mesh.chip, 1, found)
    products = [i for i, op in enumerate(plan.origin.graph.ops) if op.primitive == "dot_general"]
    assert {corrected.usual[i] for i in products} == {found["small product"]}


def test_every_class_that_measurements_tell_apart_is_found():
    truth = np.array([1.1, 1.5, 2.5, 0.8, 1.2, 0.9])
    modelled = np.random.default_rng(0).uniform(0, 1, (40, len(truth))) * [1, 1, 1, 1, 1, 0]
    found = fitted(modelled / (modelled @ truth)[:, None])
    assert list(found) == list(CLASSES[:-1])  # nothing was measured of the last class
    assert list(found.values()) == pytest.approx(truth[:-1], rel=0.1)


def test_measurements_with_other_figures_or_of_other_chips_are_not_used(plan, database):
    keep_work(database, measured(plan, {"small product": 2.0}), plan.origin.graph)
    assert efficiencies(database, replace(plan.mesh.chip, launch_s=1.0)) == {}
    assert efficiencies(database, mw.cluster("1x1 h100").chip) == {}


def test_plans_for_a_measured_chip_are_calibrated_and_say_so(plan, monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    with open_database() as database:
        keep_work(database, measured(plan, {"small product": 3.0, "elementwise": 3.0}), plan.origin.graph)
    assert mw.plan(step, *ARGS, cluster="1x1 cpu", mesh=(1,)).cost == plan.cost  # MESHWRIGHT_MEASURE=never
    monkeypatch.setenv("MESHWRIGHT_MEASURE", "once")
    found = mw.plan(step, *ARGS, cluster="1x1 cpu", mesh=(1,))
    assert found.cost.compute == pytest.approx(3 * plan.cost.compute, rel=0.1)
    assert found.step_s == pytest.approx(3 * plan.step_s, rel=0.1)  # the simulated step is that of measured kernels
    assert found.provenance["calibration"].startswith("measured ÷ modelled: small product 3.0")
    assert mw.plan(step, *ARGS, cluster="1x1 h100", mesh=(1,)).provenance.get("calibration") is None


def test_probes_are_full_of_their_classes():
    wanted = {
        "products": "product",
        "convolutions": "convolution",
        "elementwise work": "elementwise",
        "look-ups": "look-up",
        "small products": "small product",
    }
    cluster = mw.cluster("1x1 h100")
    for name, function, types in class_probes.probes("cuda", 1):
        found = mw.plan(class_probes._step(function), *types, cluster=cluster, mesh=(1,))
        shares = modelled_by_class(found, found.origin.graph, range(len(found.origin.graph.ops)), cluster.chip)
        assert shares[wanted[name]] > 0.25 * sum(shares.values()), (name, shares)


@pytest.mark.devices
def test_the_local_devices_are_calibrated(database):
    found = class_probes.calibrate(mw.cluster("local"), database, seconds=1e-6)
    assert found == [f"There was no time for {name}." for name, *_ in class_probes.probes("cpu", 8)[1:]]
    known = efficiencies(database, mw.cluster("local").chip)
    assert "product" in known and np.isfinite(list(known.values())).all()


@pytest.mark.parametrize("text", ["abc", "[]", "{}", '{"figures": "FIGURES", "modelled_s": {"product": "abc"}}'])
def test_work_of_a_foreign_file_is_left_out(database, text):
    chip = mw.cluster("1x1 cpu").chip
    text = text.replace("FIGURES", figures_digest(chip))
    database.keep([measured_now(Key(f"{WORK}f", text, chip.name, "", "float32", this_compiler()), "rehearsed", 1.0)])
    assert efficiencies(database, chip) == {}


def test_times_that_are_none_are_not_imported(database, tmp_path):
    database.keep([measured_now(Key("f", "s", "cpu", "", "float32", "c"), "rehearsed", 1.0)])
    export_json(database, tmp_path / "all.json")
    data = json.loads((tmp_path / "all.json").read_text())
    for bad, message in (
        ({"measurements": [{**data["measurements"][0], "measured_at": "zzz"}]}, "must be a time such as"),
        ({"measurements": {}}, "its measurements are no list"),
    ):
        (tmp_path / "bad.json").write_text(json.dumps(data | bad))
        with pytest.raises(DatabaseError, match=message):
            import_json(database, tmp_path / "bad.json")
