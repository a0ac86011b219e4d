"""Alpa's dumps: the printed placements are read back, whatever they are nested in, and judged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.explain.alpa.dump import INPUTS, OUTPUTS, read_dump
from meshwright.explain.alpa.repr_parser import Call, parse


def placed(shape, dims, mapping, mesh="(0,)", dtype="float32"):
    sizes = ",".join(map(str, shape))
    spec = f"ShardingSpec({_tuple(dims)}, {_tuple(mapping)})"
    return f"PlacementSpec(aval=ShapedArray({dtype}[{sizes}]), mesh_ids={mesh}, sharding_specs=({spec},))"


def _tuple(items):
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


NONE, REP2, REP4 = "NoSharding()", "Replicated(replicas=2)", "Replicated(replicas=4)"
AXIS = "ShardedAxis(axis=0)"


def state(kernel, other, moment=None):
    return f"""TrainState(step=PlacementSpec(aval=ShapedArray(int32[], weak_type=True), mesh_ids=(0,),
    sharding_specs=(ShardingSpec((), (Replicated(replicas=4),)),)), apply_fn=<bound method Module.apply of MLP(
    # attributes
    hidden = 40
)>, params=FrozenDict({{
    Dense_0: {{
        kernel: {kernel},
    }},
    Dense_1: {{
        kernel: {other},
    }},
}}), tx=GradientTransformation(init=<function chain.<locals>.init_fn at 0x7f>, update=<function f at 0x7f>),
opt_state=(TraceState(trace=FrozenDict({{
    Dense_0: {{
        kernel: {moment or kernel},
    }},
}})), EmptyState()), batch_stats=FrozenDict({{
    mean: {placed((40,), [NONE], [REP4])},
}}), dynamic_scale=None)"""


def write(folder, inputs, outputs=None, name="train_step"):
    (folder / f"{name}{INPUTS}").write_text(inputs)
    (folder / f"{name}{OUTPUTS}").write_text(outputs or placed((1, 1, 10, 40), [NONE] * 3 + ["Chunked(4)"], [AXIS]))
    return folder


WHOLE = placed((10, 40), [NONE, NONE], [REP4]), placed((40, 10), [NONE, NONE], [REP4])
DUMPS = {
    "data parallel ×4 over x": (*WHOLE, None, placed((8, 10), ["Chunked(4)", NONE], [AXIS])),
    "Megatron tensor parallel (model parallel) ×4 over x": (
        placed((10, 40), [NONE, "Chunked(4)"], [AXIS]),
        placed((40, 10), ["Chunked(4)", NONE], [AXIS]),
        None,
        placed((8, 10), [NONE, NONE], [REP4]),
    ),
    "data parallel ×2 over x, Megatron tensor parallel (model parallel) ×2 over y": (
        placed((10, 40), [NONE, "Chunked(2)"], [REP2, AXIS]),
        placed((40, 10), ["Chunked([2])", NONE], [REP2, AXIS]),
        None,
        placed((8, 10), ["Chunked(2)", NONE], [AXIS, REP2]),
    ),
    "data parallel ×4 over x, optimizer state sharded over x (ZeRO-1 or 2)": (
        *WHOLE,
        placed((10, 40), [NONE, "Chunked(4)"], [AXIS]),
        placed((8, 10), ["Chunked(4)", NONE], [AXIS]),
    ),
    "data parallel ×4 over x, parameters and optimizer state sharded over x (ZeRO-3, FSDP)": (
        placed((10, 40), [NONE, "Chunked(4)"], [AXIS]),
        placed((40, 10), ["Chunked(4)", NONE], [AXIS]),
        None,
        placed((8, 10), ["Chunked(4)", NONE], [AXIS]),
    ),
}


@pytest.mark.parametrize("said", DUMPS)
def test_dumps_are_judged(said, tmp_path):
    kernel, other, moment, batch = DUMPS[said]
    dump = read_dump(write(tmp_path, f"({state(kernel, other, moment)}, {{'x': {batch}}})"))
    assert dump.verdict == said
    text = str(dump)
    assert "0/params/Dense_0/kernel" in text and "10×40" in text and said in " ".join(text.split())
    roles = {t.path: t.role for t in dump.meshes[0].arguments}
    assert roles["0/opt_state/0/trace/Dense_0/kernel"] == "optimizer"
    assert roles["0/batch_stats/mean"] == "state" and roles["1/x"] == "data"


def test_meshes_are_stages(tmp_path):
    first = placed((10, 40), [NONE, "Chunked(2)"], [AXIS], mesh="(0,)")
    second = placed((40, 10), [NONE, NONE], [REP2], mesh="(1,)")
    dump = read_dump(write(tmp_path, f"({{'params': {{'a': {first}, 'b': {second}}}}},)", first))
    assert [mesh.number for mesh in dump.meshes] == [0, 1]
    assert "mesh 0: tensor parallel (model parallel, by column) ×2 over x" in dump.verdict
    assert "mesh 1: x splits nothing at rest" in dump.verdict


def test_several_axes_on_one_dim(tmp_path):
    kernel = placed((10, 40), [NONE, "Chunked([2, 2])"], [AXIS, "ShardedAxis(axis=1)"])
    dump = read_dump(write(tmp_path, f"({{'params': {kernel}}},)", kernel))
    assert dump.meshes[0].arguments[0].spec == ((), ("x", "y"))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / f"train_step{INPUTS}").unlink(), "lacks Alpa's"),
        (lambda f: (f / f"train_step{OUTPUTS}").unlink(), f"lacks train_step{OUTPUTS}"),
        (lambda f: write(f, "x", name="other"), "several dumps"),
        (lambda f: (f / f"train_step{INPUTS}").write_text("({'a': PlacementSpec(aval=Sh"), "line 1: expected"),
        (lambda f: (f / f"train_step{INPUTS}").write_text("PlacementSpec(mesh_ids=(0,))"), "lacks its aval"),
        (lambda f: (f / f"train_step{INPUTS}").write_text("<function f"), "not closed"),
        (lambda f: write(f, placed((10,), ["Ragged(3)"], [REP4])), "has Ragged, which is none of NoSharding"),
        (lambda f: write(f, placed((10,), [NONE], ["Twisted(3)"])), "maps to Twisted, which is neither"),
        (
            lambda f: write(f, placed((10,), [NONE], ["ShardedAxis(axis=3)"])),
            r"ShardedAxis\(3\) of a ShardingSpec that cuts 0",
        ),
        (lambda f: write(f, placed((10,), [NONE], [REP4], mesh="(0, 1)")), "is on 2 meshes but has 1 sharding_specs"),
        (lambda f: write(f, "(None, <object>)", "()"), "hold no PlacementSpec"),
        (lambda f: (f / f"train_step{OUTPUTS}").write_bytes(b"\xff\xfe"), "cannot be understood"),
    ],
)
def test_missing_and_damaged_files_are_said(tmp_path, spoil, words):
    spoil(write(tmp_path, placed((10, 40), [NONE, NONE], [REP4])))
    with pytest.raises(mw.PlanFileError, match=words.replace("*", r"\*")):
        read_dump(tmp_path)


ADAM = """({{'step': None, 'optimizer': Optimizer(optimizer_def=<flax.optim.Adam object at 0x7f>,
    state=OptimizerState(step={scalar}, param_states=FrozenDict({{Dense_0: {{kernel: _AdamParamState(grad_ema={kernel},
    grad_sq_ema={kernel})}}}})), target=FrozenDict({{params: {{Dense_0: {{kernel: {kernel}}}}}}}))}},
    [{batch}, None], 3)"""
CHAIN = """(TrainState(step={scalar}, params={{'Dense 0': {{'kernel': {kernel}}}}}, opt_state=(EmptyState(),
    (ScaleByAdamState(count={scalar}, mu=FrozenDict({{Dense_0: {{kernel: {kernel}}}}}), nu=FrozenDict({{}})),
    MaskedState(inner_state=TraceState(trace={{'Dense_0': {{'kernel': {kernel}}}}}))),
    InjectHyperparamsState(count={scalar}, hyperparams={{'learning_rate': {scalar}}}, inner_state=EmptyState())),
    batch_stats=FrozenDict({{bn: {{mean: {whole}, var: {whole}}}}})), {{'x': {batch}}})"""


@pytest.mark.parametrize("form", [ADAM, CHAIN])
def test_states_of_other_forms(form, tmp_path):
    """Optimizers that hold their parameters, chains of states, masked and nested ones, and specs that are not there."""
    parts = {
        "kernel": placed((10, 40), [NONE, "Chunked(chunks=(2,))"], [REP2, "ShardedAxis(0)"]),
        "whole": "PlacementSpec(aval=ShapedArray(float32[40]), mesh_ids=(0,), sharding_specs=(None,))",
        "scalar": "PlacementSpec(aval=ShapedArray(float32[], weak_type=True), mesh_ids=(0,), sharding_specs=(None,))",
        "batch": placed((8, 10), ["Chunked([2])", NONE], ["ShardedAxis(axis=0)", REP2], dtype="bfloat16"),
    }
    (mesh,) = read_dump(write(tmp_path, form.format(**parts), parts["scalar"])).meshes
    roles = {t.path: t.role for t in mesh.arguments}
    kernels = {path: role for path, role in roles.items() if path.endswith("kernel") or "ema" in path}
    assert sorted(set(kernels.values())) == ["optimizer", "parameters"]
    assert [r for p, r in kernels.items() if "param_states" in p or "opt_state" in p] == ["optimizer"] * 2
    assert [p for p, r in roles.items() if r == "data"] == [
        next(t.path for t in mesh.arguments if t.dtype == "bfloat16")
    ]
    verdict = str(mesh.judgement.verdict)
    assert verdict == "data parallel ×2 over x, tensor parallel (model parallel, by column) ×2 over y"


names = st.text("abcXYZ_", min_size=1, max_size=5).filter(lambda t: t not in ("None", "True", "False"))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("abc/ '\"", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(names, inner, max_size=3)
        | st.builds(Call, names, st.lists(inner, max_size=2).map(tuple), st.dictionaries(names, inner, max_size=2))
    ),
    max_leaves=10,
)


def printed(value):
    """As Python and Flax print it, with keys of dicts bare."""
    if isinstance(value, Call):
        parts = [*map(printed, value.args), *(f"{k}={printed(v)}" for k, v in value.keywords.items())]
        return f"{value.name}({', '.join(parts)})"
    if isinstance(value, dict):
        return "{\n" + "".join(f"  {k}: {printed(v)},\n" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        ends = "[]" if isinstance(value, list) else "()"
        return ends[0] + "".join(f"{printed(v)}, " for v in value) + ends[1]
    return repr(value).replace("\\'", "'") if isinstance(value, str) and "'" not in value else repr(value)


@given(values.filter(lambda v: "\\" not in repr(v)))
def test_what_python_prints_is_read_back(value):
    assert parse(printed(value)) == value
