"""Plans are kept in a directory, and taken again for the same program, devices and method; nothing else is."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.jit import Kernel

pytestmark = pytest.mark.devices


def train_step(w, x):
    value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
    return w - 0.1 * gradient, value


W, X = np.ones((8, 8), np.float32), np.ones((16, 8), np.float32)


def planned(directory, rows=X, cluster="1x2 cpu", method=None, function=train_step):
    step = mw.parallelize(function, cluster=cluster, plans=directory, method=method, donate_argnums=())
    return step, step.plan(W, rows)


def mark(directory):
    """Writes a remark into the kept plan, so that it is known when it is used."""
    (path,) = directory.iterdir()
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"remarks": ["kept"]}))
    return path


def test_a_second_run_takes_the_plan_of_the_first_and_computes_the_same(tmp_path):
    planned(tmp_path)
    mark(tmp_path)
    again, plan = planned(tmp_path)
    assert plan.remarks == ("kept",)
    for found, expected in zip(again(W, X), train_step(W, X), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert plan.verify(devices=jax.devices()[:2]).bytes.planned == plan.verify().bytes.compiled


def other_step(w, x):
    value, gradient = jax.value_and_grad(lambda w: (jnp.sin(x @ w) ** 2).mean())(w)
    return w - 0.1 * gradient, value


@pytest.mark.parametrize(
    "given",
    [{"rows": X[:8]}, {"cluster": "1x2 h100"}, {"method": mw.Auto(memory_fraction=0.5)}, {"function": other_step}],
    ids=lambda given: next(iter(given)),
)
def test_another_program_or_other_chips_are_planned_anew(tmp_path, given):
    planned(tmp_path)
    mark(tmp_path)
    assert planned(tmp_path, **given)[1].remarks == ()
    assert len(list(tmp_path.iterdir())) == 2


def cut_off(data):
    return json.dumps(data)[:1000]


def with_a_damaged_operation(data):
    data["ops"][-1][2] = None
    return json.dumps(data)


def with_a_damaged_program(data):
    data["program"]["form"] = data["program"]["form"][:-8]
    return json.dumps(data)


@pytest.mark.parametrize("damaged", [cut_off, with_a_damaged_operation, with_a_damaged_program])
def test_a_damaged_plan_is_made_anew(tmp_path, caplog, damaged):
    planned(tmp_path)
    path = mark(tmp_path)
    path.write_text(damaged(json.loads(path.read_text())))
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        step, plan = planned(tmp_path)
        step(W, X)
    assert plan.remarks == ()
    assert "is made anew: " in caplog.text
    assert json.loads(path.read_text())["remarks"] == []


def test_a_directory_that_cannot_be_written_to_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        assert planned(tmp_path / "file" / "plans")[1].arguments
    assert "the plan could not be kept for a restart: " in caplog.text


def test_the_environment_names_the_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_PLANS", str(tmp_path))
    planned(None)
    mark(tmp_path)
    assert planned(None)[1].remarks == ("kept",)


def test_a_kept_plan_is_read_without_any_kernel(tmp_path, monkeypatch):
    planned(tmp_path)
    mark(tmp_path)

    def called(kernel, *args):
        raise AssertionError(f"{kernel.name} loads numba, which takes longer than all else of reading a plan")

    monkeypatch.setattr(Kernel, "__call__", called)
    assert planned(tmp_path)[1].remarks == ("kept",)
