"""What is printed is one line where it stands among others, and HTML in notebooks."""

import numpy as np
import pytest

import meshwright as mw

ARGS = (np.ones((64, 32), np.float32), np.ones((32, 32), np.float32))


@pytest.fixture(scope="module")
def plan():
    return mw.plan(lambda x, w: x @ w, *ARGS, cluster="1x4 h100")


def test_plans_and_simulations_are_one_line_each(plan):
    assert repr(plan).startswith("<Plan: Auto on mesh x=4 of 1x4 h100, step ") and repr(plan).endswith(" per device>")
    assert repr(plan.simulate()).startswith("<Simulation: ") and "step" in repr(plan.simulate())
    for text in (repr(plan), repr(plan.simulate())):
        assert len(text) < 200 and "\n" not in text


def test_notebooks_get_html(plan):
    compared = mw.compare(lambda x, w: x @ w, *ARGS, methods="auto", cluster="1x4 h100", run=False)
    explored = mw.explore(lambda x, w: x @ w, ARGS, clusters=["1x4 h100"])
    shown = [plan.explain("w"), plan.show(), plan.diff(plan), plan.simulate(), compared, explored]
    for one in shown:
        html = one._repr_html_()
        assert html.startswith("<pre") and html.endswith("</pre>") and len(html) < 20_000
    assert "&lt;b&gt;" in mw.plan(lambda x: x, {"<b>": ARGS[0]}, cluster="1x4 h100").show()._repr_html_()
    assert str(plan.explain("w")) == repr(plan.explain("w"))
