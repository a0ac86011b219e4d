"""Maps of tensors: a part of a parameter is read from the bytes that hold it, and written back to them."""

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="meshwright.hf needs the extra [hf]")
pytest.importorskip("tokenizers", reason="meshwright.hf needs the extra [hf]")

from meshwright.hf.layout import Pick, Weight, place

WHOLE = slice(None)


def read(weight, path, shape, tensors, index):
    """The part of a parameter, and the number of elements of tensors that were read for it."""
    read_elements = []

    def fill(name, slices, target):
        target[...] = tensors[name][slices]
        read_elements.append(target.size)

    return place((weight,), path, shape).read(index, np.dtype(np.float32), fill), sum(read_elements)


def test_heads_are_split_and_moved_and_only_the_asked_are_read():
    tensor = np.arange(6 * 4 * 5, dtype=np.float32).reshape(24, 5)  # 6 heads of 4, 5 inputs
    weight = Weight("layers/{i}/q", "{i}.q", "(n h) d -> d n h")
    whole = tensor.reshape(6, 4, 5).transpose(2, 0, 1)
    for index, elements in (
        ((WHOLE, WHOLE, WHOLE), 120),
        ((slice(0, 2), slice(2, 4), WHOLE), 2 * 8),
        ((WHOLE, slice(5, 6), slice(1, 3)), 5 * 2),
        ((WHOLE, slice(2, 4), slice(1, 3)), 5 * 8),  # one range that holds both heads
    ):
        part, read_elements = read(weight, "layers/7/q", (5, 6, 4), {"7.q": tensor}, index)
        np.testing.assert_array_equal(part, whole[index])
        assert read_elements == elements


def test_one_of_several_in_a_tensor_is_picked():
    tensor = np.arange(5 * 3 * 8, dtype=np.float32).reshape(5, 24)
    weight = Weight("k", "kept", "d (part n h) -> d n h", Pick("part", 1, 3))
    part, read_elements = read(weight, "k", (5, 2, 4), {"kept": tensor}, (WHOLE, slice(1, 2), WHOLE))
    np.testing.assert_array_equal(part, tensor[:, 12:16].reshape(5, 1, 4))
    assert read_elements == 5 * 4


def test_tensors_are_joined_and_those_of_other_experts_and_layers_are_not_read():
    tensors = {f"{i}.{e}": np.full((3, 2), 10 * i + e, np.float32) for i in range(2) for e in range(4)}
    weight = Weight("layers/{i}/gate", "{i}.{e}", "f d -> e d f")
    part, read_elements = read(weight, "layers/gate", (2, 4, 2, 3), tensors, (slice(1, 2), slice(2, 4), WHOLE, WHOLE))
    assert part.shape == (1, 2, 2, 3)
    assert part[0, :, 0, 0].tolist() == [12, 13]
    assert read_elements == 2 * 6


@pytest.mark.parametrize(
    "weight",
    [
        Weight("w", "t", "(n h) d -> d n h"),
        Weight("w", "t", "d (n h) -> d n h"),
        Weight("w", "t", "d (n half h) -> d n h", Pick("half", 1, 2)),
        Weight("w", "t.{d}", "(h n) -> d n h"),
    ],
    ids=lambda weight: weight.layout,
)
def test_what_is_written_is_read_back(weight):
    parameter = np.random.default_rng(0).standard_normal((3, 4, 2)).astype(np.float32)
    found = place((weight,), "w", parameter.shape)
    tensors = {}
    for name, joined in found.tensors():
        tensors[name] = np.zeros(found.tensor_shape, np.float32)
        found.write(tensors[name], joined, parameter)
    part, _ = read(weight, "w", parameter.shape, tensors, (WHOLE, WHOLE, WHOLE))
    np.testing.assert_array_equal(part, parameter)
