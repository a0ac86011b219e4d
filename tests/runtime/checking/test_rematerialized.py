"""Values that XLA gathers whole to reshard them: they are counted and named, and plans cause none."""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import meshwright as mw
from meshwright import zoo
from meshwright.runtime.checking.compiled import frames_of
from meshwright.runtime.checking.rematerialized import heard, rematerialized_lines
from meshwright.runtime.spmd import spmd
from tests.generator.pairs import plan_of
from tests.generator.programs import Drawn

X = jax.ShapeDtypeStruct((16, 16, 16), jnp.float32)


def gathered_whole(x):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    first = jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P("y", None, "x")))
    return jnp.cos(jax.lax.with_sharding_constraint(first, NamedSharding(mesh, P(None, ("x", "y")))))


@pytest.mark.devices
def test_xlas_warning_is_counted_with_its_source_line(capfd):
    with heard() as warnings:
        text = jax.jit(gathered_whole).lower(X).compile().as_text()
        os.write(2, b"another message\n")
    (found,) = warnings.found(frames_of(text))
    line = gathered_whole.__code__.co_firstlineno + 2
    assert found.operation.endswith("sharding_constraint") and found.source == f"{__file__}:{line}"
    assert (found.before, found.after) in (
        ("{devices=[2,1,4]<=[4,2]T(1,0)}", "{devices=[1,8,1]<=[8]}"),
        ("{mesh['x'=4,'y'=2], [{'y'}, {}, {'x'}]}", "{mesh['x'=4,'y'=2], [{}, {'x', 'y'}, {}]}"),  # from JAX 0.12 on
    )
    sys.stderr.flush()
    assert capfd.readouterr().err == "another message\n"


@pytest.mark.devices
def test_the_same_shardings_as_parts_of_a_plan_cause_none():
    plan = mw.plan(gathered_whole, X, cluster="1x8 cpu", mesh={"x": 4, "y": 2})
    assert plan.verify().rematerialized == ()


def test_it_is_said_where_warnings_are_hidden(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    with heard() as warnings:
        pass
    assert not warnings.counted
    assert "TF_CPP_MIN_LOG_LEVEL=3" in rematerialized_lines(None)[0]
    assert rematerialized_lines(()) == []


@pytest.mark.devices
def test_the_plan_of_a_model_causes_none():
    """Those of other models `tests/runtime/test_spmd.py` compiles, and listens as well."""
    example = zoo.build("gpt-tiny", batch=16, dtype="float32", layers=1)
    abstract = mw.Mesh.abstract((2, 2, 2), alpha=1, beta=1)  # every contraction uses all axes that it can
    assert mw.plan(example.train_step, example.state, example.batch, mesh=abstract).verify().rematerialized == ()


@pytest.mark.devices
@pytest.mark.parametrize("seed", range(4))
def test_random_plans_of_random_programs_cause_none(seed):
    program, rng = Drawn(seed), np.random.default_rng((seed, 0))
    with heard() as warnings:
        spmd(plan_of(program, "random", rng)[1], program).lower(*program.args).compile()
    assert warnings.found() == ()
