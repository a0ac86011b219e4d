"""What stages send each other, and how long it takes."""

import numpy as np
import pytest

import meshwright as mw
from meshwright.pipeline.prices.transfer import send_s, transfer_s
from tests.pipeline.models import mlp


def test_every_byte_crosses_between_hosts_once_and_is_gathered_there():
    cluster = mw.cluster("2x4 h100")
    size = np.array([0.0, 2.0**26])
    near, far = send_s(cluster, size, size / 4, True, 4), send_s(cluster, size, size / 4, False, 4)
    assert near[0] == far[0] == 0
    assert near[1] == transfer_s(cluster, size[1], near=True)  # each device of the next stage reads all of it
    gathered = cluster.groups[0].part(1, 4).mesh((4,)).collective_s("all_gather", (0,), size[1])
    assert far[1] == pytest.approx(transfer_s(cluster, size[1] / 4) + gathered)
    assert far[1] > near[1]
    assert send_s(cluster, size / 4, size / 4, False, 4)[1] == transfer_s(cluster, size[1] / 4)  # nothing to gather


def test_fewer_devices_of_a_host_take_less_of_the_adapter_that_all_share():
    cluster, size = mw.cluster("2x8 a10g"), np.array([2.0**26])
    few, all_of_them = (send_s(cluster, size, size, False, number)[0] for number in (2, 8))
    assert few == pytest.approx(all_of_them / 4)


@pytest.mark.parametrize(("machines", "copies"), [("1x4 h100", 2), ("2x2 h100", 1)])
def test_a_stage_inside_a_host_sends_to_each_device_that_reads(machines, copies):
    """Two devices of a stage hold the whole activation, and so do those of the next."""
    step, args = mlp(256, layers=4, rows=16)
    plan = mw.plan(step, *args, cluster=machines, method=mw.ThreeD(tensor=2, pipeline=2, microbatch=4))
    whole = mw.plan(step, *args, cluster="1x2 h100", method=mw.ThreeD(pipeline=2, microbatch=4)).stages[0].send_bytes
    assert plan.stages[0].send_bytes * 2 == copies * whole
