"""What a sequence draws is right, and depends on nothing but its own scores, parameters and seed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.serving.models import Draw, Drawn, Kind
from meshwright.serving.models.sampling import draw
from meshwright.serving.models.shaping import Shape, begun, history, shaped
from meshwright.serving.requests import Sampling

pytestmark = [pytest.mark.slow]
VOCAB = 32


def drawn(scores, rows, kind=Kind.LISTED, slots=4):
    """Draws with `rows` of `Draw.row`'s arguments."""
    packed = Draw.blank(len(scores), slots)
    for at, row in enumerate(rows):
        packed[at, 1:] = Draw.row(
            **{"stops": (), "top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 0.0, "seed": 0} | row
        )
        packed[at, 0] = at
    function = jax.jit(partial(draw, kind, 5))
    last, out = function(jnp.asarray(scores), jnp.zeros(slots, jnp.int32), packed)
    return np.asarray(last), Drawn.unpack(np.asarray(out))


def random_scores(rows, seed=0):
    return 3 * np.random.default_rng(seed).standard_normal((rows, VOCAB)).astype(np.float32)


def test_the_likeliest_token_with_its_probability_and_the_best_five():
    scores = random_scores(3)
    last, result = drawn(scores, [{"index": 0}, {"index": 5, "temperature": 0.0}, {"index": 1}])
    logprobs = np.asarray(jax.nn.log_softmax(scores))
    np.testing.assert_array_equal(result.tokens, scores.argmax(1))
    np.testing.assert_array_equal(last, [*scores.argmax(1), 0])
    np.testing.assert_allclose(result.logprobs, logprobs.max(1), rtol=1e-5)
    order = np.argsort(-logprobs, axis=1)[:, :5]
    np.testing.assert_array_equal(result.top_tokens, order)
    np.testing.assert_allclose(result.top_logprobs, np.take_along_axis(logprobs, order, 1), rtol=1e-5)


def test_tokens_that_end_a_text_are_held_back():
    scores = random_scores(2)
    best = np.argsort(-scores, axis=1)
    rows = [{"index": 0, "stops": (int(best[0, 0]), int(best[0, 1]))}, {"index": 0}]
    _, result = drawn(scores, rows, Kind.GREEDY)
    np.testing.assert_array_equal(result.tokens, [best[0, 2], best[1, 0]])


@pytest.mark.parametrize(
    "top_k, top_p, min_p",
    [
        (3, 1.0, 0),
        (0, 0.6, 0),
        (4, 0.5, 0),
        (1, 1.0, 0),
        (0, 1e-6, 0),
        (VOCAB + 9, 0.999, 0),
        (0, 1, 0.2),
        (9, 0.8, 0.1),
    ],
)
def test_only_what_the_filters_leave_is_drawn(top_k, top_p, min_p):
    scores = random_scores(1)[0]
    chances = np.exp(scores / 0.8 - np.max(scores / 0.8))
    order = np.array([at for at in np.argsort(-chances) if chances[at] >= min_p][: top_k or VOCAB])
    before = np.cumsum(chances[order]) - chances[order]
    left = set(order[before < top_p * chances[order].sum()].tolist())
    rows = [{"index": at, "seed": 7, "temperature": 0.8, "top_k": top_k} for at in range(400)]
    rows = [row | {"top_p": top_p, "min_p": min_p} for row in rows]
    _, result = drawn(np.tile(scores, (400, 1)), rows, Kind.FILTERED)
    seen = set(result.tokens.tolist())
    assert seen <= left
    likely = {token for token in left if chances[token] > 0.05 * chances[sorted(left)].sum()}
    assert likely <= seen


def test_draws_follow_the_probabilities():
    scores = random_scores(1)[0] / 3
    rows = [{"index": at, "seed": at // 100, "temperature": 1.0} for at in range(3000)]
    _, result = drawn(np.tile(scores, (3000, 1)), rows, Kind.DRAWN)
    frequencies = np.bincount(result.tokens, minlength=VOCAB) / 3000
    np.testing.assert_allclose(frequencies, np.asarray(jax.nn.softmax(scores)), atol=0.03)


def test_a_seed_draws_the_same_in_any_batch_and_of_any_kind():
    scores = random_scores(6)
    row = {"index": 3, "seed": 2**63 + 12345, "temperature": 1.0}
    alone = drawn(scores[2:3], [row], Kind.DRAWN)[1].tokens[0]
    others = [{"index": at, "seed": at, "temperature": 2.0, "top_k": 2} for at in range(6)]
    for kind in (Kind.FILTERED, Kind.LISTED):
        assert drawn(scores, [*others[:2], row, *others[3:]], kind)[1].tokens[2] == alone
    many = {int(drawn(scores[2:3], [row | {"seed": seed}], Kind.DRAWN)[1].tokens[0]) for seed in range(12)}
    assert len(many) > 1


def test_scores_are_changed_by_what_was_there_and_by_what_is_favoured():
    asked = Sampling(9, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, logit_bias=((3, 4.0),))
    scores = random_scores(2)
    seen = jnp.ones((3, VOCAB), jnp.int32)  # of whoever had the slots before
    seen = jax.jit(begun)(seen, history(12, 1, [0, 1, 1], [1, 2, 2]))
    rows = np.stack([Shape.row(asked), Shape.blank(1)[0]])
    changed = np.asarray(shaped(jnp.asarray(scores), seen[np.array([1, 1])], rows))
    expected = scores[0].copy()
    expected[3] += 4
    expected[:3] = np.where(expected[:3] > 0, expected[:3] / 2, expected[:3] * 2)
    expected -= 0.25 * np.bincount([1, 2, 2], minlength=VOCAB) + 0.5 * np.isin(np.arange(VOCAB), [1, 2])
    np.testing.assert_allclose(changed, [expected, scores[1]], rtol=1e-6)
    np.testing.assert_array_equal(seen[2], 1)
