"""Reading collectives from XLA's text: literal lines as its backends print them."""

import pytest

from meshwright.runtime.checking.compiled import CompiledCollective, collectives_of, flops_of

pytestmark = pytest.mark.devices

MESH = {"x": 2, "y": 4}


def program(*lines, extra=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule jit_run\n\n{extra}ENTRY %main.1_spmd (p: f32[4]) -> f32[4] {{\n{body}\n}}\n"


def read(*lines, mesh=MESH, extra=""):
    return collectives_of(program(*lines, extra=extra), mesh)


def test_a_program_without_collectives():
    assert read("ROOT %add = f32[4]{0} add(%p, %p)") == []


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("y",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("x",)),
        ("{{0,1,2,3,4,5,6,7}}", ("x", "y")),
        ("{}", ("x", "y")),
        ("[2,4]<=[8]", ("y",)),
        ("[4,2]<=[2,4]T(1,0)", ("x",)),
        ("[1,8]<=[8]", ("x", "y")),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_2'}", ("y",)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ("x",)),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", ("y",)),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", ("x",)),
        ("mesh['a'=2,'b'=4], device_ids=(0,1,2,3,4,5,6,7) {'a','b'}", ("x", "y")),
        ("mesh['all'=8] {'all':(1)2}", ("x",)),
        ("mesh['all'=8] {'all':(2)4}", ("y",)),
    ],
)
def test_replica_groups_in_every_form_name_their_axes(groups, axes):
    line = f"%r = f32[16,8]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add"
    assert read(line) == [CompiledCollective("all_reduce", axes, 16 * 8 * 4)]


def test_three_axes():
    mesh = {"x": 2, "y": 2, "z": 2}
    line = "%r = f32[4]{0} all-reduce(%p), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add"
    assert read(line, mesh=mesh)[0].axes == ("x", "y")


def test_groups_of_one_device_are_no_communication():
    assert read("%r = f32[4]{0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}") == []


def test_bytes_follow_the_meshs_convention():
    found = read(
        "%g = bf16[16,8]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}",
        "%s = f32[4,8]{1,0:T(8,128)} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add",
        "%a = f32[4,8]{1,0} all-to-all(%p), replica_groups=[2,4]<=[8], dimensions={0}",
        "%c = pred[100]{0} collective-permute(%p), source_target_pairs={{0,4},{4,0}}",
    )
    assert found == [
        CompiledCollective("all_gather", ("y",), 16 * 8 * 2),
        CompiledCollective("reduce_scatter", ("y",), 4 * 8 * 4 * 4),
        CompiledCollective("all_to_all", ("y",), 4 * 8 * 4 * 4),
        CompiledCollective("permute", ("x",), 100),
    ]


def test_combined_results_add_up():
    combined = "%r = (f32[], f32[3]{0}, /*index=2*/f32[2,2]{1,0}) all-reduce(%a, %b, %c), replica_groups={}"
    assert read(combined)[0].bytes == 4 + 12 + 16
    parts = "(f32[1,32]{1,0}, f32[1,32]{1,0}, f32[1,32]{1,0}, f32[1,32]{1,0})"
    split = f"%t = {parts} all-to-all(%a, %b, %c, %d), replica_groups=[2,4]<=[8]"
    assert read(split)[0].bytes == 4 * 32 * 4 * 4  # the local part times the group


def test_started_collectives_count_their_results_once():
    found = read(
        "%g = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%p), replica_groups=[2,4]<=[8], dimensions={0}",
        "%gd = f32[16,8]{1,0} all-gather-done(%g)",
        "%h = ((f32[4]{0}, f32[2]{0}), (f32[16]{0}, f32[8]{0})) all-gather-start(%p, %q), replica_groups=[2,4]<=[8]",
        "%r = f32[5]{0} all-reduce-start(%p), replica_groups={}, to_apply=%add",
        "%c = (f32[6]{0}, f32[6]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}",
        "%s = ((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%p), replica_groups=[2,4]<=[8], to_apply=%add",
    )
    assert [(item.kind, item.bytes) for item in found] == [
        ("all_gather", 16 * 8 * 4),
        ("all_gather", (16 + 8) * 4),
        ("all_reduce", 20),
        ("permute", 24),
        ("reduce_scatter", 2 * 4 * 4),
    ]


BODY = """%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %r = f32[4]{0} all-reduce(%x), replica_groups={}, to_apply=%add
  %inner = f32[4]{0} while(%r), condition=%c, body=%deep, backend_config={"known_trip_count":{"n":"3"}}
}

"""
DEEP = """%deep (p: f32[4]) -> f32[4] {
  ROOT %g = f32[8]{0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}
}

"""
LOOP = "%w = (s32[], f32[4]{0}) while(%t), condition=%cond, body=%body"


def test_a_loops_collectives_run_once_a_trip():
    stated = f'{LOOP}, backend_config={{"known_trip_count":{{"n":"5"}},"other":1}}'
    found = read(stated, extra=DEEP + BODY)
    assert {(item.kind, item.trips) for item in found} == {("all_reduce", 5), ("all_gather", 15)}


def test_a_loop_of_unknown_length_counts_as_one_trip():
    found = read(LOOP, extra=DEEP + BODY)
    assert {(item.kind, item.trips) for item in found} == {("all_reduce", 1), ("all_gather", 3)}


def test_both_branches_of_a_conditional_are_read():
    branches = DEEP + DEEP.replace("%deep", "%other")
    line = "%c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%deep, %other}"
    assert [item.kind for item in read(line, extra=branches)] == ["all_gather", "all_gather"]


def test_a_computation_that_nobody_calls_does_not_run():
    assert read("ROOT %add = f32[4]{0} add(%p, %p)", extra=DEEP) == []


def test_a_start_that_holds_its_operands_counts_its_result_alone():
    one = "%r = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}) all-reduce-start(%p), replica_groups=mesh['x'=8] {'x'}"
    two = "%r = ((f32[4], f32[2]), (f32[4], f32[2])) all-reduce-start(%p, %q), replica_groups=[1,8]<=[8]"
    assert [c.bytes for c in read(one, two)] == [4 * 8 * 2, 4 * 6]


def test_zeros_between_pixels_are_no_flops():
    def convolution(window):
        return program(
            "%image = f32[2,4,4,8]{3,2,1,0} parameter(0)",
            "%kernel = f32[3,3,8,16]{3,2,1,0} parameter(1)",
            f"ROOT %c = f32[2,8,8,16]{{3,2,1,0}} convolution(%image, %kernel), window={{{window}}}, "
            "dim_labels=b01f_01io->b01f",
        )

    whole = 2 * (2 * 8 * 8 * 16) * (3 * 3 * 8)
    assert flops_of(convolution("size=3x3 pad=1_1x1_1")) == whole
    assert flops_of(convolution("size=3x3 pad=2_1x2_1 lhs_dilate=2x2")) == whole / 4


def test_a_convolution_and_its_gradients_take_as_many_flops():
    def call(result, operands, target):
        return program(
            "%image = f32[2,8,8,5]{3,2,1,0} parameter(0)",
            "%filter = f32[16,3,3,5]{3,2,1,0} parameter(1)",
            "%many = (f32[16]{0}, f32[2,4,4,16]{3,2,1,0}) custom-call(%image)",
            f"ROOT %c = ({result}{{3,2,1,0}}, u8[0]{{0}}) custom-call({operands}), window={{size=3x3 stride=2x2}}, "
            f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{target}"',
        )

    calls = [
        call("f32[2,4,4,16]", "%image, %filter", "Forward"),
        call("f32[2,4,4,16]", "%image, %filter, %bias, %side", "BiasActivationForward"),
        call("f32[2,8,8,5]", "%many#1, %filter", "BackwardInput"),
        call("f32[16,3,3,5]", "%image, %many#1", "BackwardFilter"),
    ]
    assert [flops_of(text) for text in calls] == [2 * (2 * 4 * 4 * 16) * (3 * 3 * 5)] * 4


@pytest.mark.parametrize(("target", "products"), [("Softmax", 2), ("SoftmaxBackward", 5), ("ScaleBiasSoftmax", 2)])
@pytest.mark.parametrize(("mask", "window", "scores"), [("NO_MASK", 0, 4096 * 2048), ("CAUSAL", 0, 4096 * 1024)])
def test_flops_of_fused_attention_are_those_of_its_products(target, products, mask, window, scores):
    text = (
        "ENTRY %main (q: bf16[4,4096,32,128]) -> bf16[4,32,4096,128] {\n"
        "  %q = bf16[4,4096,32,128]{3,2,1,0} parameter(0)\n"
        "  ROOT %a = (bf16[4,32,4096,128]{3,1,2,0}, u8[256]{0}) custom-call(%q, %q, %q), "
        f'custom_call_target="__cudnn$fmha{target}", backend_config={{"cudnn_fmha_backend_config":'
        '{"bmm1_dot_dimension_numbers":{"lhs_contracting_dimensions":["3"]},'
        '"intermediate_tensor_shape":{"dimensions":["4","32","4096","2048"],"element_type":"BF16"},'
        f'"mask_type":"{mask}","sliding_window_length":{window}}}}}\n'
        "}\n"
    )
    assert flops_of(text) == products * 2 * 4 * 32 * 128 * scores
