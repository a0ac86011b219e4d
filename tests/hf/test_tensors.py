"""Parts of tensors are read from files: the right bytes, and hardly any others."""

import os
from io import FileIO
from pathlib import Path
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("safetensors", reason="meshwright.hf needs the extra [hf]")
pytest.importorskip("tokenizers", reason="meshwright.hf needs the extra [hf]")

from safetensors.numpy import save_file

import meshwright as mw
from meshwright.hf.tensors import Tensors

WHOLE = slice(None)


@pytest.fixture
def whole(tmp_path):
    """Two tensors in one file: one of rows of 160 KB, and a smaller one after it."""
    random = np.random.default_rng(0)
    arrays = {
        "wide": random.integers(0, 2**15, (6, 3, 80_000), np.uint16).view(ml_dtypes.bfloat16),
        "small": random.standard_normal((5, 7)).astype(np.float32),
    }
    save_file(arrays, tmp_path / "model.safetensors")
    return arrays


def fill(folder, name, slices, dtype):
    checkpoint = Tensors(folder)
    shape = [len(range(*part.indices(size))) for part, size in zip(slices, checkpoint.all[name].shape, strict=True)]
    target = np.empty(shape, dtype)
    checkpoint.fill(name, slices, target)
    return target


@pytest.mark.parametrize(
    "slices",
    [
        (WHOLE, WHOLE, WHOLE),
        (slice(2, 5), WHOLE, WHOLE),
        (WHOLE, slice(1, 2), WHOLE),
        (WHOLE, WHOLE, slice(100, 101)),
        (slice(5, 6), slice(0, 3), slice(79_000, 80_000)),
        (slice(0, 4), slice(1, 3), slice(10_000, 70_000)),
        (slice(3, 3), WHOLE, WHOLE),
    ],
)
def test_a_part_of_a_tensor_is_what_numpy_takes_from_it(whole, tmp_path, slices):
    bits = fill(tmp_path, "wide", slices, ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(bits, whole["wide"].view(np.uint16)[slices])


def test_a_part_of_a_small_tensor_behind_another(whole, tmp_path):
    for slices in ((WHOLE, WHOLE), (slice(1, 4), slice(2, 6)), (WHOLE, slice(6, 7))):
        np.testing.assert_array_equal(fill(tmp_path, "small", slices, np.float32), whole["small"][slices])


class CountedFile(FileIO):
    """A file that notes how many bytes are asked of it at a time."""

    sizes: ClassVar[list[int]] = []

    def readinto(self, buffer):
        self.sizes.append(len(buffer))
        return super().readinto(buffer)


class CountedPath(type(Path())):
    """A path whose files are counted where they are read without a buffer, as tensors are."""

    def open(self, mode="r", buffering=-1, **options):
        return CountedFile(self) if buffering == 0 else super().open(mode, buffering, **options)


def test_columns_of_long_rows_are_read_without_what_lies_between(whole, tmp_path):
    """A narrow part of each row of 160 KB: the rows are not read; those of 28 bytes are, in one go."""
    CountedFile.sizes.clear()
    fill(CountedPath(tmp_path), "wide", (WHOLE, WHOLE, slice(10, 20)), ml_dtypes.bfloat16)
    assert CountedFile.sizes == [20] * 18
    CountedFile.sizes.clear()
    fill(CountedPath(tmp_path), "small", (WHOLE, slice(2, 4)), np.float32)
    assert CountedFile.sizes == [4 * (4 * 7 + 2)]


def test_a_file_that_is_cut_off_after_it_was_checked_is_one_sentence(whole, tmp_path):
    checkpoint = Tensors(tmp_path)
    assert set(checkpoint.all) == {"wide", "small"}
    os.truncate(tmp_path / "model.safetensors", 1000)
    with pytest.raises(mw.CheckpointError, match=r"model.safetensors ends early: it changed while it was read"):
        checkpoint.fill("wide", (WHOLE, WHOLE, WHOLE), np.empty((6, 3, 80_000), ml_dtypes.bfloat16))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(mw.CheckpointError, match=r"model.safetensors cannot be read: No such file or directory"):
        checkpoint.fill("small", (WHOLE, WHOLE), np.empty((5, 7), np.float32))
