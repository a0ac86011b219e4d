"""Optimizers and schedules by name: those of optax, with the run's rate and length filled in."""

import jax.numpy as jnp
import optax
import pytest

from meshwright.errors import TrainingError
from meshwright.trainer.optimizers import make_optimizer
from meshwright.trainer.settings import read_settings


def made(**tables):
    return make_optimizer(read_settings(None, {"model": "llama-tiny", "data": "x", "steps": 100, **tables}))


def test_the_rate_rises_to_the_peak_and_falls_until_the_end():
    optimizer = {"learning_rate": 0.5}
    _, rate = made(optimizer=optimizer, schedule={"name": "warmup_cosine_decay", "options": {"warmup_steps": 10}})
    assert float(rate(0)) == 0 and float(rate(10)) == 0.5 and float(rate(100)) == pytest.approx(0, abs=1e-6)
    _, constant = made(optimizer=optimizer)
    assert float(constant(50)) == 0.5
    _, cosine = made(optimizer=optimizer, schedule="cosine_decay_schedule")
    assert float(cosine(0)) == 0.5 and float(cosine(100)) == pytest.approx(0, abs=1e-6)


def test_gradients_are_clipped_and_updates_are_optaxs_own():
    found, _ = made(optimizer={"name": "sgd", "learning_rate": 0.1, "clip_norm": 1.0, "options": {"momentum": 0.9}})
    params = {"w": jnp.zeros(2)}
    updates, _ = found.update({"w": jnp.array([3.0, 4.0])}, found.init(params), params)
    own = optax.sgd(0.1, momentum=0.9)
    expected, _ = own.update({"w": jnp.array([0.6, 0.8])}, own.init(params), params)
    assert jnp.allclose(updates["w"], expected["w"])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"optimizer": "adamv"}, "optax has no optimizer 'adamv'; the nearest is .*adamw"),
        ({"schedule": "cosine_decy"}, "optax has no schedule 'cosine_decy'; the nearest is .*cosine_decay"),
        (
            {"optimizer": {"options": {"weight_deca": 1}}},
            "optimizer.options of adamw has no 'weight_deca'.*weight_decay",
        ),
        ({"schedule": "warmup_cosine_decay"}, "schedule.options of .* lacks 'warmup_steps'"),
        (
            {"schedule": {"name": "cosine_decay", "options": {"decay_steps": -1}}},
            "schedule.options of cosine_decay cannot be used: .*decay_steps",
        ),
    ],
)
def test_names_that_optax_has_not_are_refused_with_the_nearest(tables, message):
    with pytest.raises(TrainingError, match=message):
        made(**tables)
