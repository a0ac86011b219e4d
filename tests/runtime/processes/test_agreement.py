"""What processes say of their next batch: which of them is at fault, in one sentence."""

import numpy as np
import pytest

from meshwright.runtime.processes.agreement import batch_types, compare

pytestmark = pytest.mark.devices

FOUR = {"types": {"x": "float32[4, 8]", "scale": "float32[] = 0.5"}}


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (FOUR, ""),
        ({"end": True}, "process 1 has no more batches after 3, and process 0 has more; give the same number"),
        ({"error": "ValueError: bad"}, "the batches of process 1 ended in ValueError: bad, after 3 of them"),
        ({"left": True}, "process 1 stopped taking batches after 3, and others did not"),
        ({"types": FOUR["types"] | {"x": "float32[3, 8]"}}, "batch 4 has x as float32[3, 8] in process 1 and as float"),
        ({"types": {"x": "float32[4, 8]"}}, "batch 4 has scale as nothing in process 1 and as float32[] = 0.5 in"),
    ],
)
def test_the_process_and_the_cause_are_named(second, said):
    found = compare({0: FOUR, 1: second, 2: FOUR}, 3)
    assert found.startswith(said) and bool(found) == bool(said)


def test_all_may_end():
    assert compare({0: {"end": True}, 1: {"end": True}}, 3) == ""


def test_what_all_must_have_alike_is_compared_by_value():
    batch = {"x": np.zeros((4, 8), "f4"), "scale": np.float32(0.5), "names": ("a", 2)}
    assert batch_types(batch) == {
        "names/0": "str = a",
        "names/1": "int32[] = 2",
        "scale": "float32[] = 0.5",
        "x": "float32[4, 8]",
    }
    assert batch_types(np.zeros(3, "f4")) == {"its array": "float32[3]"}
