"""Least squares with a prior whose weight the measurements decide.

The coefficients ``x`` minimise, over the measurements ``r`` and what is expected of the coefficients beforehand ``p``,

    Σ_r (Σ_c rows_rc · x_c − 1)²  +  λ · Σ_p (Σ_c prior_pc · x_c − expected_p)²

with the ``λ`` that predicts a measurement best from all others: where they agree it is small, and where they are few or
noisy it is large.
"""

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

WEIGHTS = 10.0 ** np.arange(-6, 3)  # of the prior, that are tried; beyond either end nothing changes


def fit(rows: Matrix, prior: Matrix, expected: Matrix, least: float) -> Matrix:
    """The coefficients, none below ``least``; those that would be are held there, and the others are fitted again."""
    free = np.ones(rows.shape[1], bool)
    found = np.full(rows.shape[1], least)
    while free.any():
        held = np.where(free, 0.0, least)
        given = 1.0 - rows @ held, expected - prior @ held
        some = _best(rows[:, free], prior[:, free], *given)
        found[free] = some
        if (some >= least).all():
            break
        free &= found >= least
        found = np.maximum(found, least)
    return found


def _best(rows: Matrix, prior: Matrix, target: Matrix, expected: Matrix) -> Matrix:
    tried = [_weighted(rows, prior, target, expected, weight) for weight in WEIGHTS]
    return min(tried, key=lambda one: one[0])[1]


def _weighted(rows: Matrix, prior: Matrix, target: Matrix, expected: Matrix, weight: float) -> tuple[float, Matrix]:
    """The mean squared error of measurements that are each predicted from the others, and the coefficients."""
    inverse = np.linalg.pinv(rows.T @ rows + weight * prior.T @ prior, hermitian=True)
    found = inverse @ (rows.T @ target + weight * prior.T @ expected)
    own = np.einsum("rc,cd,rd->r", rows, inverse, rows)  # how much a measurement says about itself
    error = (target - rows @ found) / np.maximum(1.0 - own, 1e-9)
    return float(np.mean(error**2)), found
