"""What runs between the start and the end of collectives in a scheduled program."""

import pytest

import meshwright as mw
from meshwright.runtime.checking.compiled import collectives_of
from meshwright.runtime.checking.verify import verify
from meshwright.simulator.hidden import hidden_bytes, hidden_shares
from meshwright.simulator.lanes import run
from meshwright.simulator.work import COLLECTIVE, COMPUTE, GRADIENTS, Task
from tests.runtime.steps import CPU, batch, params, train_step

GROUPS = "replica_groups=[1,8]<=[8]"
SCHEDULED = f"""HloModule jit_run, is_scheduled=true

%async (p: f32[64]) -> f32[8] {{
  %p = f32[64]{{0}} parameter(0)
  ROOT %reduce-scatter.9 = f32[8]{{0}} reduce-scatter(%p), {GROUPS}, dimensions={{0}}, to_apply=%sum
}}

ENTRY %main (a: f32[8], b: f32[64]) -> f32[64] {{
  %a = f32[8]{{0}} parameter(0)
  %b = f32[64]{{0}} parameter(1)
  %all-gather-start.1 = (f32[8]{{0}}, f32[64]{{0}}) all-gather-start(%a), {GROUPS}, dimensions={{0}}
  %fusion.1 = f32[64]{{0}} fusion(%b), kind=kLoop, calls=%x
  %scatter-start = ((f32[64]{{0}}), f32[8]{{0}}) async-start(%fusion.1), calls=%async
  %cublas = f32[64]{{0}} custom-call(%fusion.1), custom_call_target="__cublas$gemm"
  %all-gather-done.1 = f32[64]{{0}} all-gather-done((f32[8]{{0}}, f32[64]{{0}}) %all-gather-start.1)
  %scatter-done = f32[8]{{0}} async-done(%scatter-start)
  %get = f32[64]{{0}} bitcast(%all-gather-done.1)
  %all-reduce-start.2 = f32[64]{{0}} all-reduce-start(%get), {GROUPS}, to_apply=%sum
  %all-reduce-done.2 = f32[64]{{0}} all-reduce-done(%all-reduce-start.2)
  %all-reduce-start.3 = f32[64]{{0}} all-reduce-start(%get), {GROUPS}, backend_config={{"is_sync":true}}
  %fusion.4 = f32[64]{{0}} fusion(%b), kind=kLoop, calls=%x
  %all-reduce-done.3 = f32[64]{{0}} all-reduce-done(%all-reduce-start.3)
  ROOT %all-reduce.4 = f32[64]{{0}} all-reduce(%all-reduce-done.2), {GROUPS}, to_apply=%sum
}}
"""


def test_work_between_start_and_end_is_counted():
    made = {item.name: (item.kind, item.beside) for item in collectives_of(SCHEDULED, {"x": 8})}
    assert made == {
        "reduce-scatter.9": ("reduce_scatter", 1),
        "all-gather-start.1": ("all_gather", 2),
        "all-reduce-start.2": ("all_reduce", 0),
        "all-reduce-start.3": ("all_reduce", 0),
        "all-reduce.4": ("all_reduce", 0),
    }


def test_shares_are_of_the_time_in_which_the_device_computes():
    tasks = (
        Task("a", COMPUTE, "compute", 1.0),
        Task("sent early", COLLECTIVE, GRADIENTS, 2.0, "", (0,)),
        Task("b", COMPUTE, "compute", 1.0),
        Task("waited for", COLLECTIVE, "collective", 1.0, "", (1, 2)),
        Task("c", COMPUTE, "compute", 1.0, "", (3,)),
    )
    shares = {span.task.name: share for span, share in hidden_shares(run(tasks, 0.0))}
    assert shares == pytest.approx({"sent early": 0.5, "waited for": 0.0})


def test_a_verification_compares_what_is_hidden():
    plan = mw.plan(train_step, params(), batch(4096), cluster=CPU, mesh=(8,), method=mw.DataParallel())
    found = verify(plan, hidden=hidden_bytes(plan))
    assert found.hidden == {} and found.hidden_share == 1.0  # XLA's CPU backend has no asynchronous collectives
    assert sum(hidden_bytes(plan).values()) <= sum(item.bytes * item.trips for item in plan.collectives)
