"""The page as text: one file, no network, small, and safe whatever the names in it are."""

import json
import re

import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.parallelism.words import bytes_on_device
from meshwright.report.page import page
from tests.explain.plans import plan_of, tensor_parallel
from tests.plans.records.test_staged_record import planned


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_holds_the_plan_and_needs_no_network():
    text = page(tensor_parallel(), None, 0.5)
    (shown,) = data_of(text)["plans"]
    assert shown["cost"]["total"] == tensor_parallel().cost.total
    assert sum(c["seconds"] for c in shown["collectives"]) == pytest.approx(tensor_parallel().cost.communication)
    assert sum(row["count"] for row in shown["tensors"]) == len(tensor_parallel().arguments) + 1
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text) and "{{" not in re.sub(r"`[^`]*`", "", text)[:2000]


@pytest.mark.parametrize("plan", [tensor_parallel, lambda: planned("replicas")], ids=["program", "stages"])
def test_every_parameter_has_alternatives_however_short_the_time(plan):
    (shown,) = data_of(page(plan(), None, 1e-9))["plans"]
    rows = [row for row in shown["tensors"] if row["role"] == "parameters" and row["shape"]]
    assert rows and all(row["reason"] and "alternatives" in row for row in rows)
    found = [a for row in rows for a in row["alternatives"]]
    assert found and all(a["sure"] == "at least" or a["difference"] is None for a in found)


def test_a_new_plan_shows_the_blocks_of_its_program(tmp_path):
    def layers(x, weights):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x

    mesh = mw.Mesh.abstract((2,), 1, 1)
    plan = mw.plan(layers, jnp.ones((8, 4)), [jnp.ones((4, 4))] * 3, mesh=mesh)
    (shown,) = data_of(page(plan, None, 0.0))["plans"]
    assert shown["blocks"]["count"] == 3 and len(shown["blocks"]["segments"]) == 1
    assert [run["first"] for run in shown["blocks"]["runs"]] == [0, 1, 2]
    assert [(row["choices"], row["times"]) for row in shown["blocks"]["rows"]] == [("rows, columns, contracted", 3)]
    plan.save(tmp_path / "plan.json")  # a file does not hold the traced program
    assert data_of(page(mw.Plan.load(tmp_path / "plan.json"), None, 0.0))["plans"][0]["blocks"] is None


def test_names_that_look_like_tags_do_no_harm():
    mesh = mw.Mesh.abstract((2,), 1, 1)
    plan = mw.plan(lambda x: jnp.sin(x["</script><b>"]), {"</script><b>": jnp.ones(8)}, mesh=mesh)
    text = page(plan, None, 0.0)
    assert text.count("</script>") == 2
    assert any("</script><b>" in row["path"] for row in data_of(text)["plans"][0]["tensors"])


def test_a_notebook_gets_a_frame():
    frame = tensor_parallel()._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and "&lt;!doctype html&gt;" in frame


@pytest.mark.slow
def test_chunks_meshes_and_bytes_of_stages_are_the_plans_own():
    plan = planned("interleaved")
    (shown,) = data_of(page(plan, None, 0.0))["plans"]
    assert [stage["layers"] for stage in shown["stages"]] == ["0 2", "1 3"]
    assert shown["mesh"]["axes"] == "x=1 × y=2 for each of 2 stages" and shown["mesh"]["sizes"] == [1, 2]
    held = [row["held"] for row in shown["tensors"] if row["role"] in ("parameters", "optimizer")]
    for number, stage in enumerate(plan.stages):
        own = sum(bytes_on_device(t.shape, t.dtype, t.spec, stage.mesh.shape) for t in stage.tensors)
        assert sum(sizes[number] for sizes in held) == own > 0


def test_the_page_of_two_plans_says_when_they_are_for_different_problems():
    one, other = (plan_of("gpt-tiny", (4, 2), mw.DataParallel(), seq=seq) for seq in (16, 32))
    found = data_of(page(one, other, 0.0))["difference"]
    assert len(found["problems"]) == 2 and "int32[8, 16] in one" in found["problems"][0]


def test_the_instructions_of_stages_are_those_that_the_simulator_plays():
    plan = planned("replicas")
    (shown,) = data_of(page(plan, None, 0.0))["plans"]
    for number, listed in enumerate(shown["instructions"]):
        own = plan.instructions(number)
        assert plan.simulate().work.instructions[number] == own and listed["left_out"] == 0
        assert [row[0] for row in listed["shown"]] == [one.do for one in own]


def test_stages_have_their_own_limits():
    plan = planned("replicas")
    (shown,) = data_of(page(plan, None, 0.0))["plans"]
    assert [stage["limit"] for stage in shown["stages"]] == [plan.memory.limit_bytes] * len(plan.stages)


@pytest.mark.parametrize("seconds", [-1, float("inf"), True, "long"])
def test_time_that_is_none_is_refused(seconds, tmp_path):
    with pytest.raises(mw.ShardingError, match="give the time for the page, 0 or more"):
        tensor_parallel().report(tmp_path / "page.html", seconds=seconds)
