"""A sample of what people combine: each cell is equal to one device; `python benchmarks/matrix.py` tries all pairs.

Each precision and framework occurs in the sample, in cells that are quick.
"""

from itertools import combinations, product

import numpy as np
import pytest

from tests.matrix.axes import FRAMEWORKS, MODES, PRECISIONS, PROGRAMS, Cell, covering
from tests.matrix.cells import EQUAL, run
from tests.matrix.one_device import differing, reference

SAMPLE = [
    "float32/convolution/plain/spmd/1",
    "float32/scan/haiku/spmd/1",
    "float32/embedding/plain/1f1b/0",
    "float32/embedding/nnx/spmd/1",
    "float32/scan/equinox/spmd/1",
    "bf16 compute/embedding/linen/spmd/0",
    "bf16 parameters/tied embedding/plain/microbatches/1",
    "float16 scaled/checkpoint/equinox/microbatches/0",
    "fp8 products/dropout/nnx/spmd/0",
    "int8 with LoRA/embedding/plain/spmd/0",
]


@pytest.mark.sweep(4)
@pytest.mark.devices
@pytest.mark.parametrize("cell", SAMPLE)
def test_a_cell_is_equal_to_one_device(cell):
    outcome = run(Cell.of(cell))
    assert outcome.verdict == EQUAL, outcome.words


@pytest.mark.parametrize("seed", [0, 5])
def test_every_pair_is_in_a_cell(seed):
    cells, axes = covering(seed), (PRECISIONS, PROGRAMS, FRAMEWORKS, MODES)
    for a, b in combinations(range(len(axes)), 2):
        assert {(cell[a], cell[b]) for cell in cells} == set(product(axes[a], axes[b]))
    assert len(cells) < 1.3 * len(PROGRAMS) * len(MODES)
    assert cells == covering(seed) and cells != covering(seed + 1)


def test_cells_are_written_and_read_alike():
    for cell in covering(0, frameworks=("plain",)):
        assert Cell.of(str(cell)) == cell
    with pytest.raises(ValueError, match="'jax' of 'float32/scan/jax/spmd/0' is none of plain, linen"):
        Cell.of("float32/scan/jax/spmd/0")


@pytest.mark.devices
def test_what_rounding_does_not_explain_is_told():
    """A step that is lost, or a gradient without a part of the batch, is larger than any tolerance of the sample."""
    expected = reference("float32", "convolution", "plain")
    assert not differing(expected, list(expected.leaves))
    for place, (path, leaf) in enumerate(expected.leaves):
        if np.issubdtype(leaf.dtype, np.floating) and leaf.any():
            for factor in (0.75, 1.001):
                found = list(expected.leaves)
                found[place] = (path, leaf * np.float32(factor))
                assert path in differing(expected, found)
