"""The verdict in one sentence: kinds of parallelism, numbers of devices, hosts."""

from types import SimpleNamespace

import pytest

import meshwright as mw
from meshwright.parallelism.sentence import plain_sentence
from meshwright.plans.records.judgement import Verdict, VerdictPart

ZERO3 = "parameters, gradients and optimizer state sharded over x (ZeRO-3, FSDP)"
ZERO1 = "optimizer state sharded over x (ZeRO-1)"
MESHES = {name: mw.cluster(name) for name in ("50x4 a100-40gb", "2x8 h100", "1x8 cpu", "4x4 tpu-v4")}
CASES = [
    (
        "50x4 a100-40gb",
        (50, 4),
        [("data", "x"), ("tensor", "y"), ("zero", "x", 1.0, ZERO3)],
        "FSDP across 50 hosts, tensor parallel inside each host",
    ),
    ("50x4 a100-40gb", (200,), [("data", "x"), ("zero", "x", 1.0, ZERO3)], "FSDP over 200 GPUs"),
    (
        "2x8 h100",
        (2, 4, 2),
        [("data", "xy"), ("tensor", "z"), ("zero", "x", 1.0, ZERO1)],
        "Data parallel over 8 groups of 2 GPUs with sharded optimizer state, tensor parallel over 2 devices inside "
        "each host",
    ),
    (
        "2x8 h100",
        (2, 8),
        [("data", "x"), ("data", "y"), ("zero", "y", 1.0, ZERO3)],
        "Data parallel across 2 hosts, FSDP inside each host",
    ),
    (
        "2x8 h100",
        (2, 8),
        [("data", "x"), ("data", "y"), ("zero", "xy", 1.0, ZERO1)],
        "Data parallel over 16 GPUs with sharded optimizer state",
    ),
    (
        "2x8 h100",
        (2, 8),
        [("data", "x"), ("data", "y"), ("zero", "y", 1.0, ZERO1)],
        "Data parallel across 2 hosts, data parallel inside each host with sharded optimizer state",
    ),
    ("2x8 h100", (16,), [("tensor", "x"), ("vocabulary", "x")], "Tensor parallel over 16 GPUs"),
    ("1x8 cpu", (8,), [("data", "x"), ("sequence", "x", 0.2)], "Data parallel over 8 CPU devices"),
    ("2x8 h100", (16,), [("idle", "x")], "All 16 GPUs repeat the same work"),
    ("4x4 tpu-v4", (4, 4), [("data", "x"), ("idle", "y")], "Data parallel across 4 hosts, with groups of 4 TPUs that"),
]


def plan_like(mesh, parts):
    made = []
    for name, axes, *rest in parts:
        share, text = rest[0] if rest else 1.0, rest[1] if len(rest) > 1 else f"{name} over {axes}"
        made.append(VerdictPart(name, tuple(axes), 1, share, text))
    return SimpleNamespace(stages=(), microbatches=1, recompute="none", verdict=Verdict(tuple(made)), mesh=mesh)


@pytest.mark.parametrize(("cluster", "shape", "parts", "sentence"), CASES, ids=lambda case: str(case)[:20])
def test_a_verdict_is_one_plain_sentence(cluster, shape, parts, sentence):
    assert plain_sentence(plan_like(MESHES[cluster].mesh(shape), parts)).startswith(sentence)


def test_what_has_no_plain_word_is_said_in_symbols():
    plan = plan_like(mw.cluster("2x8 h100").mesh((16,)), [("other", "x", 1.0, "A_x B · B C → A_x C")])
    assert plain_sentence(plan) == "A_x B · B C → A_x C"
