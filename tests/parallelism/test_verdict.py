"""Verdicts: named methods and mixtures made by hand, over the zoo; and the kinds of their tensors."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import zoo
from tests.explain.plans import plan_of, tensor_parallel

pytestmark = pytest.mark.slow

DATA = "data parallel ×8 over x"
TWO = "data parallel ×4 over x, Megatron tensor parallel ×2 over y"
ZERO = {
    1: ", optimizer state sharded over x (ZeRO-1)",
    2: ", gradients and optimizer state sharded over x (ZeRO-2)",
    3: ", parameters, gradients and optimizer state sharded over x (ZeRO-3, FSDP)",
}
MATRICES = {
    "state/params/layers/*/up": P(None, "y"),
    "state/params/layers/*/down": P("y"),
    "state/params/layers/*/[qkv]": P(None, "y"),
    "state/params/layers/*/o": P("y"),
    "batch/*": P("x"),
}
MOMENTS = {f"state/{m}/layers/*/up": P("x", "y") for m in ("mu", "nu")}
MOMENTS |= {f"state/{m}/layers/*/down": P("y", "x") for m in ("mu", "nu")}
SHARDED = {
    "state/params/layers/*/up": P("x", "y"),
    "state/params/layers/*/gate": P("x", "y"),
    "state/params/layers/*/down": P("y", "x"),
    "state/params/layers/*/[qkv]": P("x", "y"),
    "state/params/layers/*/o": P("y", None, "x"),
    "batch/*": P("x"),
}
EXPERTS = {"state/params/layers/0/up": P("x"), "state/params/layers/0/down": P("x"), "batch/*": P("x")}
SEQUENCE = "tensor parallel ×4 over x (columns) in 21% of the work, sequence parallel ×4 over x in 79% of the work"
WHOLE = {"batch/*": P(None, "x"), "state/params/*": P()}

LAYER = "state/params/layers/*/"
TABLES = {"state/params/embed": P("y"), "state/params/head": P("y"), "batch/*": P("x")}
OVER_Z = {f"{LAYER}{name}": P(None, "z") for name in ("up", "[qkv]")} | {
    f"{LAYER}{name}": P("z") for name in ("down", "o")
}
FSDP = SHARDED | {
    path.replace("params", moment): spec
    for path, spec in SHARDED.items()
    for moment in ("mu", "nu")
    if "params" in path
}
ON_THREE = {path: P(*("z" if axis == "y" else axis for axis in spec)) for path, spec in FSDP.items()}
BY_EXPERTS = {f"{LAYER}up": P("y"), f"{LAYER}down": P("y"), "batch/*": P(("x", "y"))}
IN_TURNS = {f"state/params/layers/{i}/kernel": P("x") if i % 2 else P(None, "x") for i in range(6)} | {"batch/*": P()}
TURNS = "Megatron tensor parallel ×4 over x"
PART = (
    "data parallel ×8 over x in 43% of the work, Megatron tensor parallel ×8 over x in 57% of the work, "
    "42% of the parameters sharded over x with their gradients and optimizer state (ZeRO-3, FSDP)"
)
THREE = "data parallel ×4 over x and y, Megatron tensor parallel ×2 over z, vocabulary over z"

TABLE = [
    *((name, (8,), mw.DataParallel(), {}, DATA) for name in ("mlp", "gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny")),
    *((name, (8,), mw.DataParallel(), {}, DATA) for name in ("moe-tiny", "mixtral-tiny", "wide-resnet-tiny")),
    ("llama-tiny", (8,), mw.DataParallel(), {"scan": True}, DATA),
    ("llama-tiny", (8,), mw.DataParallel(), {"checkpoint": True}, DATA),
    ("gpt-tiny", (4, 2), mw.DataParallel(), {}, "data parallel ×8 over x and y"),
    ("gpt-tiny", (8, 1), mw.DataParallel(), {}, DATA),
    *(("mlp", (8,), mw.Zero(stage), {}, DATA + ZERO[stage]) for stage in (1, 2, 3)),
    *(("llama-tiny", (8,), mw.Zero(stage), {}, DATA + ZERO[stage]) for stage in (1, 2, 3)),
    *(("gpt-tiny", (8,), mw.Zero(stage), {}, DATA + ZERO[stage]) for stage in (1, 2)),
    *(("moe-tiny", (8,), mw.Zero(stage), {}, DATA + ZERO[stage]) for stage in (1, 2)),
    *(("vit-tiny", (8,), mw.Zero(stage), {}, DATA + ZERO[stage]) for stage in (1, 2)),
    ("llama-tiny", (8,), mw.Zero(3), {"scan": True}, DATA + ZERO[3]),
    ("mlp", (4,), mw.TensorParallel(), {}, "Megatron tensor parallel ×4 over x"),
    ("mlp", (4, 2), mw.TensorParallel(), {}, TWO),
    ("vit-tiny", (4, 2), mw.TensorParallel(), {}, TWO),
    ("gpt-tiny", (4, 2), mw.TensorParallel(), {}, TWO + ", vocabulary over y"),
    ("bert-tiny", (4, 2), mw.TensorParallel(), {}, TWO + ", vocabulary over y"),
    ("llama-tiny", (4, 2), mw.TensorParallel(), {"scan": True}, TWO + ", vocabulary over y"),
    ("moe-tiny", (4, 2), mw.TensorParallel(), {}, TWO + ", experts over y, vocabulary over y"),
    ("gpt-tiny", (4, 2), mw.Auto(fix=MATRICES), {}, TWO + ", vocabulary over y"),
    ("gpt-tiny", (4, 2), mw.Auto(fix=MATRICES | MOMENTS), {}, TWO + ", vocabulary over y" + ZERO[2]),
    ("llama-tiny", (4, 2), mw.Auto(fix=SHARDED), {}, TWO + ", vocabulary over y" + ZERO[3]),
    ("moe-tiny", (4,), mw.Auto(fix=EXPERTS), {}, "data parallel ×4 over x, experts over x"),
    ("gpt-tiny", (4,), mw.Auto(fix=WHOLE), {"batch": 1}, SEQUENCE),
    ("gpt-tiny", (1,), mw.Auto(), {}, "one device: nothing is split"),
    *(
        (
            name,
            (4, 2),
            mw.Manual(fix),
            {},
            f"{DATA.replace('8', '4')}, data parallel ×2 over y in {share}, vocabulary over y",
        )
        for name, fix, share in (
            ("gpt-tiny", {k: v for k, v in TABLES.items() if "head" not in k}, "86% of the work"),
            ("llama-tiny", TABLES, "82% of the work"),
        )
    ),
    ("gpt-tiny", (2, 2, 2), mw.Manual(OVER_Z | {"batch/*": P(("x", "y"))}), {}, THREE),
    ("llama-tiny", (2, 2, 2), mw.Auto(fix=ON_THREE | {"batch/*": P(("x", "y"))}), {}, THREE + ZERO[3]),
    ("moe-tiny", (2, 4), mw.Manual(BY_EXPERTS), {}, "data parallel ×8 over x and y, experts over y"),
    ("mixtral-tiny", (4,), mw.Auto(), {}, "data parallel ×4 over x, experts over x"),
    ("llama-tiny", (4,), mw.Manual(WHOLE), {"batch": 1}, "sequence parallel ×4 over x"),
    ("unet-tiny", (4,), mw.Zero(3), {}, "data parallel ×4 over x" + ZERO[3]),
    (
        "wide-resnet-tiny",
        (2, 2),
        mw.TensorParallel(),
        {},
        TWO.replace("4", "2").replace("Megatron ", "") + " (columns and rows)",
    ),
    ("gpt-tiny", (8,), mw.Zero(3), {}, PART),
    ("gpt-tiny", (4, 2), mw.TensorParallel(), {"checkpoint": True}, TWO + ", vocabulary over y"),
    ("mlp", (4,), mw.Manual(IN_TURNS), {"batch": 8}, TURNS),
]


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("name", "shape", "method", "options", "said"), TABLE)
def test_verdicts_are_right(name, shape, method, options, said):
    assert str(plan_of(name, shape, method, **options).verdict) == said


@pytest.mark.parametrize(
    ("shape", "method", "said"),
    [
        ((4, 2), mw.TensorParallel(), TWO + ", vocabulary over y"),
        ((8,), mw.DataParallel(), DATA),
    ],
)
def test_forward_passes_are_judged_as_well(shape, method, said):
    example = zoo.build("llama-tiny")
    mesh = mw.Mesh.abstract(shape, 1.0, 1e-3)
    plan = mw.plan(example.loss, example.state["params"], example.batch, mesh=mesh, method=method)
    assert str(plan.verdict) == said


@pytest.mark.parametrize(("dim", "said"), [(0, "data parallel ×8 over x"), (2, "over x")])
def test_heads_are_no_experts(dim, said):
    def attention(q, k, v):
        scores = jnp.einsum("bshd,bthd->bhst", q, k)
        return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v)

    array, spec = jnp.ones((8, 16, 8, 4)), P(*(None,) * dim, "x")
    method = mw.Manual({"*": spec, "out": spec})
    plan = mw.plan(attention, array, array, array, mesh=mw.Mesh.abstract((8,), 1.0, 1e-3), method=method)
    assert str(plan.verdict).endswith(said) and "expert" not in str(plan).lower()


def test_kinds_say_which_part_a_tensor_plays():
    plan = tensor_parallel()
    assert plan.kind("state/params/layers/0/up") == "tensor (column)"
    assert plan.kind("state/params/layers/1/up_bias") == "tensor (column)"
    assert plan.kind("state/params/layers/0/down") == "tensor (row)"
    assert plan.kind("state/nu/layers/0/down") == "tensor (row)"
    assert plan.kind("state/params/embed") == "vocabulary"
    assert plan.kind("state/params/layers/0/attn_norm/scale") == "replicated (data parallel)"
    assert plan.kind("batch/tokens") == "data (split over x)"
    assert plan.kind("out/0/params/layers/0/up") == "tensor (column)"
    assert set(plan.kind("state/params/layers/*/q").values()) == {"tensor (column)"}


def test_kinds_of_sharded_state_and_of_experts():
    plan = plan_of("llama-tiny", (8,), mw.Zero(3))
    assert plan.kind("state/params/layers/0/up") == plan.kind("state/mu/layers/0/up") == "zero (sharded over data)"
    plan = plan_of("mlp", (8,), mw.Zero(1))
    weight = next(t.path for t in plan.arguments if t.role == "parameters" and len(t.shape) == 2)
    assert plan.kind(weight) == "replicated (data parallel)"
    assert plan.kind(weight.replace("params", "mu")) == "zero (sharded over data)"
    plan = plan_of("moe-tiny", (4, 2), mw.TensorParallel())
    assert plan.kind("state/params/layers/0/up") == "expert"
    plan = plan_of("gpt-tiny", (4,), mw.Auto(fix=WHOLE), batch=1)
    assert plan.kind("batch/tokens") == "sequence (split over x)"


X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
NOISE = jax.random.key(0)


def drawn(state, batch):
    """A critic of images that a generator makes from noise of its own: no dim of the noise is any argument's."""
    made = jnp.tanh(jax.random.normal(NOISE, (4096, 64)) @ state["generator"])
    return jnp.mean((made @ state["critic"]) ** 2) + jnp.mean((batch @ state["critic"]) ** 2)


@pytest.mark.parametrize(
    ("function", "args", "method", "said"),
    [
        (lambda x: x @ x, (X,), mw.Manual({"x": P("x")}), "the rows of the largest product split ×4 over x"),
        (lambda x: x @ x, (X,), mw.TensorParallel(), "the columns of the largest product split ×4 over x"),
        (lambda x: jnp.sin(x), (X,), mw.Manual({"x": P()}), "nothing is split: every device does the same work"),
        (lambda x: jnp.sin(x), (X,), mw.DataParallel(), "data parallel ×4 over x"),
        (lambda w, x: w @ x, (jnp.ones((4096, 64)), jnp.ones((64, 512))), mw.DataParallel(), "data parallel ×4 over x"),
    ],
)
def test_plans_that_fit_no_name_are_said_in_words(function, args, method, said):
    plan = mw.plan(function, *args, cluster="1x4 h100", mesh=(4,), method=method)
    assert str(plan.verdict) == said


def test_a_batch_that_the_program_draws_itself_is_a_batch():
    state = {"generator": jnp.ones((64, 4096)), "critic": jnp.ones((4096, 64))}
    batch = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    plan = mw.plan(drawn, state, batch, cluster="1x4 h100", mesh=(4,), method=mw.DataParallel())
    assert str(plan.verdict) == "data parallel ×4 over x"


def test_dims_of_one_letter_show_it_once():
    plan = mw.plan(lambda x: x @ x, X, cluster="1x4 h100", mesh=(4,), method=mw.TensorParallel())
    assert plan.judgement.letters["x"] == ("B", "")


def test_the_verdict_of_a_loaded_plan_is_the_same(tmp_path):
    plan = tensor_parallel()
    plan.save(tmp_path / "plan.json")
    again = mw.Plan.load(tmp_path / "plan.json")
    assert again.verdict == plan.verdict and again.judgement == plan.judgement


def test_work_that_is_repeated_is_called_idle():
    """On real chips a toy is not worth splitting: the batch lies split and is gathered."""
    plan = mw.plan(*_toy(), cluster="1x8 h100", mesh=(8,), method=mw.DataParallel())
    assert "at rest only" in str(plan.verdict)


def _toy():
    from tests.planner.examples import zoo_args

    step, args = zoo_args("mlp", batch=8, hidden=8, layers=2)
    return step, *args
