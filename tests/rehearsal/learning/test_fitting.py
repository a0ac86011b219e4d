"""The prior counts little where measurements agree, and much where they are noisy or say nothing."""

import numpy as np

from meshwright.rehearsal.learning.fitting import fit


def test_exact_measurements_decide_alone():
    rows = np.random.default_rng(0).uniform(0, 1, (12, 3))
    true = np.array([0.3, 2.0, 40.0])
    rows /= (rows @ true)[:, None]
    weight = np.sqrt((rows**2).mean(axis=0))
    np.testing.assert_allclose(fit(rows, np.diag(weight), weight, 0.01), true, rtol=1e-3)


def test_what_no_measurement_speaks_of_is_as_expected():
    rows = np.array([[0.5, 0.0], [0.5, 0.0], [0.5, 0.0]])
    np.testing.assert_allclose(fit(rows, np.diag([0.5, 0.1]), np.array([0.5, 0.1]), 0.01), [2, 1], rtol=1e-3)


def test_noise_alone_leaves_what_is_expected():
    noise = np.random.default_rng(0).normal(0, 0.3, (40, 8))
    rows = np.concatenate([np.ones((40, 1)), noise], axis=1)  # the first explains all
    found = fit(rows, np.eye(9), np.ones(9) * (np.arange(9) == 0), -10)
    np.testing.assert_allclose(found[1:], 0, atol=0.02)


def test_nothing_is_below_the_least():
    rows = np.array([[1.0, 0.5], [1.0, 0.2], [1.0, 0.1]])  # the second seems to take less than nothing
    rows /= np.array([0.5, 0.8, 0.9])[:, None]
    found = fit(rows, np.diag([1.0, 0.3]), np.array([1.0, 0.3]), 0.05)
    assert found.min() == 0.05 and 0.6 < found[0] < 1
