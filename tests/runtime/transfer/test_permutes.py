"""Collective permutes in one process; `test_processes.py` has them between two."""

import re

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.runtime.transfer.permutes import Permutes
from meshwright.runtime.transfer.routes import Move

pytestmark = pytest.mark.devices


def moves():
    """Unlike shapes; a device that sends twice and one that receives twice, so that there are several rounds."""
    a, b, c, d = jax.devices()[2:6]
    boxes = [((0, 3), (0, 2)), ((4, 5), (0, 7)), ((0, 2), (2, 4)), ((0, 0), (0, 4)), ((1, 2), (1, 2))]
    pairs = [(a, c), (a, d), (b, c), (b, d), (d, a)]
    return [Move(box, source, target) for box, (source, target) in zip(boxes, pairs, strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "bool", "int4"])
def test_every_piece_arrives_on_its_device(dtype):
    rng = np.random.default_rng(0)
    sent = [
        jax.device_put(rng.integers(0, 2, move.shape).astype(jax.numpy.dtype(dtype)), move.source) for move in moves()
    ]
    transport = Permutes(moves(), sent[0].dtype, 60.0)
    received = transport.exchange(sent)
    transport.wait(received)
    for move, ours, theirs in zip(moves(), sent, received, strict=True):
        assert theirs.devices() == {move.target} and theirs.dtype == ours.dtype
        np.testing.assert_array_equal(theirs, ours)


def test_the_compiled_program_has_one_pair_of_devices_for_each_move():
    text = Permutes(moves(), np.dtype("float32"), 60.0).lower().compile().as_text()
    pairs = [pair for found in re.findall(r"source_target_pairs=\{\{(.*?)\}\}", text) for pair in found.split("},{")]
    place = {device: i for i, device in enumerate(jax.devices()[2:6])}
    assert sorted(pairs) == sorted(f"{place[move.source]},{place[move.target]}" for move in moves())


def test_a_program_that_fails_is_an_error_that_names_the_processes():
    transport = Permutes(moves(), np.dtype("float32"), 60.0)

    def fail(*_):
        raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo ReduceScatter failed: Connection closed by peer")

    transport._run = fail
    sent = [jax.device_put(np.zeros(move.shape, np.float32), move.source) for move in moves()]
    with pytest.raises(mw.ProcessError, match="one of the processes 0 ended or failed while they moved an array"):
        transport.exchange(sent)
