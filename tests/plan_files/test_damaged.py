"""A damaged plan is refused in one sentence that says where, whatever reads it."""

import copy
import json

import pytest

import meshwright as mw
from meshwright.plan_files.stored_operations import ops_to_json, parse_ops
from meshwright.plans.operations import OpPlan
from tests.test_hostile import plans


def loaded(tmp_path, name, place, change):
    """The plan whose entry at a place, such as ``stages/0/tensors``, is changed by a function of what was there."""
    data = copy.deepcopy(json.loads(plans()[name]))
    *before, last = (int(key) if key.isdecimal() else key for key in place.split("/"))
    holder = data
    for key in before:
        holder = holder[key]
    holder[last] = change(holder[last])
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    return mw.Plan.load(path)


@pytest.mark.parametrize(
    ("name", "place", "value", "words"),
    [
        ("staged", "stages/0/tensors/0/path", "another", r"stages\[0\] holds 'another', which is no argument"),
        (
            "staged",
            "stages/1/recompute/compute_s",
            -1e308,
            r"stages\[1\].recompute.compute_s is -1e\+308 .* at least 0",
        ),
        ("staged", "stages/0/submesh", 1e-300, r"stages\[0\].submesh is 1e-300 but must be a table"),
        ("staged", "stages/0/forward", {"product_s": 0.0}, r"stages\[0\].forward.compute_s is"),
        ("spmd", "arguments/1", None, r"arguments\[1\] is None but must be a table"),
        ("spmd", "arguments/1", {"shape": []}, "the entry 'spec' is missing"),
        ("spmd", "arguments/1/shape", 7, r"arguments\[1\].shape is 7 but must be a list"),
        ("spmd", "mesh/cluster/chip", {"name": "x"}, "mesh.cluster.chip.vendor is missing"),
        ("spmd", "mesh/cluster/intra/protocols/0", "fast", r"mesh.cluster.intra.protocols\[0\] is 'fast'"),
        ("spmd", "mesh/cluster/inter", None, "mesh.cluster.inter is None but must be a Link"),
        ("spmd", "memory/extra", 3, "memory has an entry 'extra', which is none of peak_bytes"),
        ("spmd", "in_structure", {"leaf": 0}, "in_structure does not name each of 15 leaves once"),
        ("spmd", "out_structure", {}, "out_structure has an entry|out_structure.node is missing"),
        ("spmd", "considered/0/rounds", [[1]], r"considered\[0\].rounds\[0\].status is missing"),
    ],
)
def test_a_damaged_entry_is_said_when_the_plan_is_loaded(name, place, value, words, tmp_path):
    holder, _, last = place.rpartition("/")
    with pytest.raises(mw.PlanFileError, match=words) as caught:
        if last == "extra":
            loaded(tmp_path, name, holder, lambda found: found | {"extra": value})
        else:
            loaded(tmp_path, name, place, lambda _: value)
    assert "Error" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "change", "words"),
    [
        ("collectives/1/axes", lambda axes: axes * 2, r"collectives\[1\] is split over '.' twice"),
        ("collectives/0", lambda _: True, r"collectives\[0\] is True but must be a table"),
        ("judgement/verdict", lambda _: [["data"]], r"judgement.verdict\[0\].axes is missing"),
        ("judgement/of", lambda of: [10**6, *of[1:]], "judgement.of does not name"),
        ("arguments/1/path", lambda _: "another", "damaged in its 'record': it knows nothing of 'another'"),
        ("ops/0", lambda row: row[:6], r"ops\[0\] has 6 entries"),
        ("ops/0", lambda _: [0, "label", 9, 0], r"ops\[0\] repeats row 9"),
    ],
)
def test_a_damaged_list_is_said_by_whatever_reads_it(place, change, words, tmp_path):
    plan = loaded(tmp_path, "spmd", place, change)
    with pytest.raises(mw.PlanFileError, match=words) as caught:
        str(plan), mw.simulate(plan), plan.diff(plan), plan.dump(tmp_path / "dump"), plan.record
    assert "TypeError" not in str(caught.value)


def test_an_axis_may_be_summed_over_and_left_to_a_loop():
    op = OpPlan(0, "dot", "forward", ((("x",),),), (None,), (((),),), (None,), sums=("x",), waits=("x",))
    assert parse_ops(ops_to_json([op]), ("x",), "ops") == (op,)
