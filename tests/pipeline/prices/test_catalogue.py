"""Views: which are tried, that a bound on them is one, and recipes over many hosts."""

import math

import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.pipeline.planner import start_search
from meshwright.pipeline.prices.catalogue import FREE, LEAN, STEADY, TENSOR, Catalogue
from meshwright.pipeline.prices.layer_prices import ALL_SECONDS, Item
from tests.pipeline.models import mlp


def catalogue_of(made, machines) -> Catalogue:
    step, args = made
    method = mw.Auto(pipeline=True)
    return start_search(trace(step, *args), mw.cluster(machines), method, lambda _: None).catalogue


@pytest.mark.parametrize(
    "machines", ["3x5 a100-80gb", "8x8 v100-16gb", "64x8 h100", "1x72 b200", "18x4 gb200", "4x1 h100"]
)
def test_views_follow_the_machines_and_are_few(machines):
    catalogue = catalogue_of(mlp(64, layers=2, rows=8), machines)
    per_host, total = catalogue.cluster.devices_per_host, catalogue.cluster.num_devices
    found = catalogue.ways(0, total, total)
    assert len(found) == len(set(found)) <= 60
    for view, _ in found:
        size = math.prod(view)
        assert total % size == 0 and len(view) <= 2
        assert per_host % size == 0 or size % per_host == 0
        assert len(view) == 1 or view[1] <= per_host  # at most one axis leaves the host
    assert {math.prod(view) for view, _ in found if len(view) == 1} >= {
        k for k in range(1, per_host + 1) if per_host % k == 0
    }


def test_views_over_many_hosts_are_tried_where_that_is_asked_for():
    catalogue = catalogue_of(mlp(64, layers=2, rows=64), "8x4 h100")
    narrow = catalogue.ways(0, 32, 16)
    assert catalogue.widen(16) and not catalogue.widen(16)
    wide = catalogue.ways(0, 32, 16)
    assert set(wide) - set(narrow) == {((8, 4), way) for way in (FREE, STEADY, LEAN)} | {((32,), TENSOR)}
    assert len(set(wide)) == len(wide)
    assert catalogue.ways(0, 32, 8) == narrow
    assert not catalogue_of(mlp(64, layers=2, rows=8), "2x4 h100").widen(8)


def test_time_per_row_falls_with_the_rows():
    catalogue = catalogue_of(mlp(256, layers=3, rows=64), "2x4 h100")
    for view, way in [((1,), FREE), ((2,), TENSOR), ((4,), FREE), ((2, 2), FREE), ((8,), TENSOR)]:
        once = [Item.GRADIENTS_SENT, Item.UPDATE, Item.UPDATE_SENT]
        for rows in catalogue.grid:
            items = catalogue.prices(0, view, way, rows).items
            often = items[ALL_SECONDS].sum() - items[once].sum()
            total = (often * 64 / rows + items[once].sum()) * math.prod(view) / 8
            assert total >= catalogue.least_s(0, view, way) * (1 - 1e-9)


@pytest.mark.slow
def test_two_axes_do_what_one_cannot():
    """Experts over the hosts, their products over the devices of each."""
    example = zoo.build("mixtral-8x7b", batch=1, layers=2)
    catalogue = catalogue_of((example.train_step, (example.state, example.batch)), "2x8 h100")
    one, two = (catalogue.prices(0, view, FREE, 1).items[ALL_SECONDS].sum() for view in ((16,), (2, 8)))
    assert two < 0.9 * one


def test_a_recipe_may_split_weights_over_many_hosts():
    step, args = mlp(2048, layers=4, rows=16)
    for machines, tensor, pipeline in (
        ("4x8 h100", 32, 1),
        ("8x8 h100", 32, 2),
        ("1x72 b200", 8, 1),
        ("4x5 h100", 10, 2),
    ):
        data = mw.cluster(machines).num_devices // (tensor * pipeline)
        batch = (args[0], type(args[1])((16 * data, 2048), args[1].dtype))
        recipe = mw.ThreeD(data=data, tensor=tensor, pipeline=pipeline, microbatch=4)
        plan = mw.plan(step, *batch, cluster=machines, method=recipe)
        assert {s.mesh.sizes for s in plan.stages} == {(data, tensor)}


def test_a_single_microbatch_is_split_as_is_best_for_one():
    catalogue = catalogue_of(mlp(256, layers=2, rows=8), "1x4 h100")
    for rows, alike in ((8, True), (4, False)):
        free, before = catalogue.prices(0, (4,), FREE, rows), catalogue.num_solves
        steady = catalogue.prices(0, (4,), STEADY, rows)
        assert (catalogue.num_solves == before) == alike
        assert steady is free or not alike
