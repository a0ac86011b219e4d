"""Where the model of a machine is wrong, plans by measurement are those of the right model.

Measured seconds are computed here from another cluster's prices, so that nothing depends on how busy the machine is:
the plan that a wrong model finds by such measurements is priced by the true one.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.cost.rates import cluster_rates
from meshwright.hardware.clusters import CATALOGUE
from meshwright.profiler.measurements import measured_now
from meshwright.rehearsal import search
from meshwright.rehearsal.measuring import Measuring
from meshwright.rehearsal.parts import modelled_communication

pytestmark = pytest.mark.slow

#: A machine that was measured, whose devices keep their rates beside others; the catalogue's are slower then.
TRUE = replace(mw.cluster("1x8 cpu"), known="measured")
SHAPE = (8,)
MODELS = {
    "mlp": {"batch": 512},
    "gpt-tiny": {"batch": 32, "layers": 1},
    "moe-tiny": {"batch": 32, "layers": 2},
    "wide-resnet-tiny": {"batch": 32},
}


def cluster(start=1.0, rate=1.0, flops=1.0):
    """The machine as a wrong model sees it: collectives that start and run, and products that run, so much faster."""
    link, chip = TRUE.intra, TRUE.chip
    protocols = tuple(replace(p, base_s=p.base_s / start, hop_s=p.hop_s / start) for p in link.protocols)
    link = replace(
        link, bandwidth=rate * link.bandwidth, shared_bandwidth=rate * link.shared_bandwidth, protocols=protocols
    )
    rates = tuple((dtype, flops * known) for dtype, known in chip.flops)
    return replace(TRUE, host=replace(TRUE.host, intra=link), chip=replace(chip, intra=link, flops=rates))


def true_s(plan, serials=None, trips=1.0):
    """Seconds of a plan, or of some of its operations, on the true machine."""
    mesh, names = TRUE.mesh(plan.mesh.sizes), plan.mesh.names
    ops = [op for op in plan.ops if op.load is not None and (serials is None or op.serial in serials)]
    found = sum(cluster_rates(TRUE).load_s(op.load) * op.load.trips for op in ops)
    for item in plan.collectives:
        if serials is None or item.serial in serials:
            axes = [names.index(axis) for axis in item.axes]
            ((true_alpha, true_beta),) = mesh.alternatives(item.kind, axes)
            ((alpha, beta),) = plan.mesh.alternatives(item.kind, axes)
            start_s, bytes_s = modelled_communication(plan, [item]).values()
            found += start_s * true_alpha / alpha + bytes_s * true_beta / beta
    return found / trips


class TrueMeasuring(Measuring):
    """Measures on the true machine, at once."""

    is_over = False

    def measure(self, candidates):
        for one in candidates:
            key, part = one.key(self.device), one.part
            if key not in self.found:
                serials = {one.traced.graph.ops[index].serial for index in part.operations}
                self.found[key] = measured_now(key, one.kind, true_s(one.plan, serials, max(part.trips, 1.0)), 1)
                self.num_measured += 1
        return self.found


@pytest.fixture
def profile(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(search, "Measuring", TrueMeasuring)
    monkeypatch.setattr(
        search, "compiled_in", lambda seconds, plan, traced: SimpleNamespace(plan=plan, memory_bytes=None)
    )
    monkeypatch.setattr(search, "step_times", lambda steps: [true_s(step.plan) for step in steps])
    return mw.Auto(profile=True, profile_seconds=10, mesh_shapes=[SHAPE])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("wrong", [{"start": 50, "rate": 50}, {"start": 0.02, "rate": 0.02}, {"start": 100}], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_wrong_collectives_are_corrected(model, wrong, profile):
    built = zoo.build(model, **MODELS[model])
    arguments = built.train_step, built.state, built.batch
    best = mw.plan(*arguments, cluster=TRUE, mesh=SHAPE)
    assert true_s(best) == pytest.approx(best.cost.total)  # the plan's price is what is measured here
    found = mw.plan(*arguments, cluster=cluster(**wrong), method=profile)
    assert true_s(found) <= 1.01 * best.cost.total
    assert found.cost.total == pytest.approx(true_s(found), rel=0.01)


@pytest.mark.parametrize("wrong", [cluster(flops=10), replace(TRUE, known=CATALOGUE)], ids=["products", "in a step"])
def test_wrong_compute_is_corrected(wrong, profile):
    built = zoo.build("mlp", batch=512)
    arguments = built.train_step, built.state, built.batch
    best = mw.plan(*arguments, cluster=TRUE, mesh=SHAPE)
    found = mw.plan(*arguments, cluster=wrong, method=profile)
    assert true_s(found) <= 1.01 * best.cost.total
    assert found.cost.total == pytest.approx(true_s(found), rel=0.01)


def test_the_models_own_plan_would_be_slower():
    """Else the tests above would show nothing."""
    built = zoo.build("gpt-tiny", **MODELS["gpt-tiny"])
    arguments = built.train_step, built.state, built.batch
    best = mw.plan(*arguments, cluster=TRUE, mesh=SHAPE)
    for wrong in ({"start": 50, "rate": 50}, {"start": 0.02, "rate": 0.02}):
        assert true_s(mw.plan(*arguments, cluster=cluster(**wrong), mesh=SHAPE)) > 1.05 * best.cost.total
