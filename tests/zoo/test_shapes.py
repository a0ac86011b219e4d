"""Every published model, by shapes alone: it has the published number of parameters, and it traces."""

from functools import cache

import jax
import pytest

from meshwright import zoo

pytestmark = pytest.mark.slow

PUBLISHED = [name for name in zoo.names() if zoo.entry(name).num_params]
UNSCANNED = ("wide_resnet", "unet")


@cache
def build(name):
    """Builds a model at its published size, scanned where it can be, as that takes less time."""
    return zoo.build(name, scan=zoo.entry(name).family not in UNSCANNED)


@pytest.mark.sweep(24)
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    published = zoo.entry(name).num_params
    # Counts of released weights must agree to 1 %; figures like "1.3B" are themselves rounded to two digits.
    rounded = published == float(f"{published:.1e}")
    assert build(name).num_params == pytest.approx(published, rel=0.04 if rounded else 0.01)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if zoo.entry(name).family == "gpt"])
def test_parameter_count_of_gpt_follows_its_formula(name):
    config = build(name).config
    d = config.hidden
    per_layer = 12 * d * d + 13 * d  # four projections and two feed-forward weights; their biases and two norms
    expected = config.layers * per_layer + (config.vocab + config.positions) * d + 2 * d
    assert build(name).num_params == expected


@pytest.mark.sweep(24)
@pytest.mark.parametrize("name", PUBLISHED)
def test_loss_traces(name):
    """Gradients and updates are the same code at any size: `test_example.py` runs them for the least of each family."""
    example = build(name) if zoo.entry(name).family not in UNSCANNED else zoo.build(name, layers=1)
    assert jax.eval_shape(example.loss, example.state["params"], example.batch).shape == ()


def test_train_step_traces_at_full_depth_unrolled():
    example = zoo.build("llama2-7b")
    assert jax.eval_shape(example.train_step, example.state, example.batch)[0] == example.state
