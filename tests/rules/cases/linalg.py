"""Cases of transforms and matrix decompositions."""

from collections.abc import Callable
from functools import partial

import numpy as np
from jax import lax

from ..contract import Case, bound
from . import Builder, Sizes

OF_A_MATRIX: dict[str, Callable] = {
    "cholesky": partial(lax.linalg.cholesky, symmetrize_input=False),
    "eig": lax.linalg.eig,
    "eigh": partial(lax.linalg.eigh, symmetrize_input=False),
    "hessenberg": lax.linalg.hessenberg,
    "lu": lax.linalg.lu,
    "qr": partial(lax.linalg.qr, full_matrices=False),
    "schur": lax.linalg.schur,
    "svd": partial(lax.linalg.svd, full_matrices=False),
    "tridiagonal": lax.linalg.tridiagonal,
}


def _well_conditioned(size: Sizes, *batch: int, n: int = 3) -> np.ndarray:
    noise = size.unit(*batch, n, n)
    return (noise + noise.swapaxes(-1, -2) + 4 * np.eye(n)).astype(np.float32)


def _of_a_matrix(name: str) -> Builder:
    def batch_of_matrices(size: Sizes) -> Case:
        matrices = _well_conditioned(size, 2, 1)
        return Case(bound(OF_A_MATRIX[name], name, matrices), [matrices])

    return batch_of_matrices


def batches(size: Sizes) -> Case:
    matrices = _well_conditioned(size, *size.shape(2))
    return Case(bound(OF_A_MATRIX["cholesky"], "cholesky", matrices), [matrices])


def reflectors(size: Sizes) -> Case:
    return Case(lax.linalg.householder_product, [_well_conditioned(size, 4), size.unit(4, 3)])


def times_reflectors(size: Sizes) -> Case:
    operands = [_well_conditioned(size, 2), size.unit(2, 3), size.floats(2, 3, 2)]
    return Case(bound(lax.linalg.ormqr, "ormqr", *operands), operands)


def pivots(size: Sizes) -> Case:
    return Case(
        partial(lax.linalg.lu_pivots_to_permutation, permutation_size=3), [np.array([[1, 2], [0, 1]], np.int32)]
    )


def rank_one_update(size: Sizes) -> Case:
    return Case(lax.linalg.cholesky_update, [_well_conditioned(size), size.unit(3)])


def symmetric_product(size: Sizes) -> Case:
    operands = [size.floats(2, 3, 2), _well_conditioned(size, 2)]
    return Case(
        bound(partial(lax.linalg.symmetric_product, symmetrize_output=False), "symmetric_product", *operands), operands
    )


def tridiagonal_system(size: Sizes) -> Case:
    diagonals = [size.unit(2, 4) + shift for shift in (0, 4, 0)]
    return Case(lax.linalg.tridiagonal_solve, [*diagonals, size.floats(2, 4, 2)])


def _solve(left: bool) -> Builder:
    def solve(size: Sizes) -> Case:
        n = size()
        operands = [_well_conditioned(size, 2), size.floats(2, 3, n) if left else size.floats(2, n, 3)]
        return Case(partial(lax.linalg.triangular_solve, left_side=left, lower=True), operands)

    return solve


def real_transform(size: Sizes) -> Case:
    return Case(partial(lax.fft, fft_type="RFFT", fft_lengths=(6,)), [size.floats(*size.shape(2), 6)])


def transform_of_two_dims(size: Sizes) -> Case:
    signal = (size.floats(size(), 2, 4) + 1j * size.floats(1, 2, 4)).astype(np.complex64)
    return Case(partial(lax.fft, fft_type="FFT", fft_lengths=(2, 4)), [signal])


CASES: list[tuple[str, Builder]] = [
    ("cholesky", batches),
    ("triangular_solve", _solve(left=True)),
    ("triangular_solve", _solve(left=False)),
    ("fft", real_transform),
    ("fft", transform_of_two_dims),
]

ALIKE: list[tuple[str, Builder]] = [
    *((name, _of_a_matrix(name)) for name in OF_A_MATRIX),
    ("householder_product", reflectors),
    ("ormqr", times_reflectors),
    ("lu_pivots_to_permutation", pivots),
    ("cholesky_update", rank_one_update),
    ("symmetric_product", symmetric_product),
    ("tridiagonal_solve", tridiagonal_system),
]
