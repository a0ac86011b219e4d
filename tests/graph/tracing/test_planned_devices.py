"""Code that asks for devices while it is traced for a cluster finds the devices of that cluster."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental.pallas import tpu as pltpu

import meshwright as mw
from meshwright.errors import TraceError
from meshwright.graph import trace
from meshwright.graph.tracing.planned_devices import traced_for
from meshwright.hardware import find_chip

ATTENTION = "dot_product_attention_fwd_wrapper"


def asked(question: Callable[[], Any], cluster: str | None) -> Any:
    """The answer that a function gets to a question while it is traced for a cluster."""
    found = []

    def function(x: Any) -> Any:
        found.append(question())
        return x

    trace(function, jnp.ones(2), cluster=None if cluster is None else mw.cluster(cluster))
    return found[0]


@pytest.mark.parametrize(
    ("cluster", "platform", "kind"),
    [
        ("16x8 h100", "gpu", "NVIDIA H100 80GB HBM3"),
        ("1x4 tpu-v5p", "tpu", "TPU v5p"),
        ("1x8 mi300x", "gpu", "AMD Instinct MI300X"),
        ("1x8 cpu", "cpu", "cpu"),
        (None, "cpu", "cpu"),
    ],
)
def test_platform_and_kind_are_those_of_the_cluster(cluster: str | None, platform: str, kind: str) -> None:
    assert asked(jax.default_backend, cluster) == platform
    device = asked(lambda: jax.devices()[0], cluster)
    assert (device.platform, device.device_kind) == (platform, kind)
    assert jax.default_backend() == "cpu"


def test_the_branch_of_the_planned_platform_is_traced_and_no_other() -> None:
    @jax.jit
    def branches(x: Any) -> Any:
        return jax.lax.platform_dependent(x, cuda=jnp.sin, tpu=jnp.cos, default=jnp.tan)

    def planned_for(cluster: str | None) -> list[str]:
        traced = trace(branches, jnp.ones(2), cluster=None if cluster is None else mw.cluster(cluster))
        return [op.primitive for op in traced.graph.columns.signatures]

    assert [planned_for(name) for name in ("1x8 h100", "1x4 tpu-v4", "1x8 mi300x", "1x8 cpu", None)] == [
        ["sin"], ["cos"], ["tan"], ["tan"], ["tan"]
    ]  # fmt: skip
    assert "platform_index" in str(jax.make_jaxpr(branches)(jnp.ones(2)))  # JAX's own traces are as they were
    with pytest.raises(TraceError, match=r"branches for tpu, but not for cuda.*plan for another chip"):
        trace(lambda x: jax.lax.platform_dependent(x, tpu=jnp.cos), jnp.ones(2), cluster=mw.cluster("1x8 h100"))


def test_a_traced_function_counts_the_devices_and_hosts_of_the_cluster() -> None:
    counts = asked(lambda: (jax.device_count(), jax.local_device_count(), jax.process_count()), "3x4 a100")
    assert counts == (12, 4, 3)
    assert asked(lambda: jax.local_devices()[-1].process_index, "3x4 a100") == 0
    assert asked(lambda: jax.devices("cpu")[0].platform, "3x4 a100") == "cpu"
    assert asked(lambda: jax.extend.backend.get_backend().platform, "3x4 a100") == "gpu"


def test_nvidia_chips_tell_their_compute_capability() -> None:
    assert asked(lambda: jax.devices()[0].compute_capability, "1x8 a100") == "8.0"
    with pytest.raises(TraceError, match="asks for 'compute_capability' of the device it is planned for, a tpu-v4"):
        asked(lambda: jax.devices()[0].compute_capability, "1x4 tpu-v4")
    capabilities = [bool(chip.compute_capability) == (chip.vendor == "NVIDIA") for chip in mw.hardware.chips()]
    assert all(capabilities)


def test_kernels_learn_how_many_cores_the_chip_has() -> None:
    assert asked(lambda: jax.devices()[0].core_count, "1x8 h100") == 132
    assert asked(lambda: pltpu.get_tpu_info().num_cores, "1x4 tpu-v5p") == 2
    with pytest.raises(TraceError, match="asks for 'core_count' of the device it is planned for, a mi300x"):
        asked(lambda: jax.devices()[0].core_count, "1x8 mi300x")


def test_what_jax_keeps_of_a_function_does_not_hide_another_cluster() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        return x * {"cpu": 1, "gpu": 2, "tpu": 3}[jax.default_backend()]

    def factor(cluster: str | None) -> str:
        with traced_for(cluster and mw.cluster(cluster)):
            return str(jax.make_jaxpr(inner)(1))

    assert ["1:i32" in factor(None), "2:i32" in factor("1x8 h100"), "3:i32" in factor("1x4 v4")] == [True] * 3
    assert float(inner(1.0)) == 1.0


def test_values_computed_while_tracing_are_computed_here() -> None:
    def function(x: Any) -> Any:
        with jax.ensure_compile_time_eval():
            return x + float(jnp.arange(3).sum()) * jax.device_count()

    graph = mw.plan(function, jnp.ones(8), cluster="1x8 h100")
    assert graph.mesh.num_devices == 8


QUERY, KEYS = jax.ShapeDtypeStruct((4, 64, 8, 64), "bfloat16"), jax.ShapeDtypeStruct((4, 64, 2, 64), "bfloat16")
LENGTHS = jax.ShapeDtypeStruct((4,), "int32")
VARIANTS = {
    "plain": ({}, ()),
    "causal": ({"is_causal": True}, ()),
    "window": ({"is_causal": True, "local_window_size": (16, 0)}, ()),
    "bias": ({}, ("bias",)),
    "lengths": ({}, ("query_seq_lengths", "key_value_seq_lengths")),
}
EXTRA = {
    "bias": jax.ShapeDtypeStruct((1, 8, 64, 64), "bfloat16"),
    "query_seq_lengths": LENGTHS,
    "key_value_seq_lengths": LENGTHS,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_attention_is_traced_without_cuda(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", None)  # as where JAX has no plug-in for CUDA
    options, extra = VARIANTS[variant]

    def loss(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        given = dict(zip(extra, rest, strict=True))
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options, **given).sum()

    args = (QUERY, KEYS, KEYS, *(EXTRA[name] for name in extra))
    traced = trace(jax.grad(loss, argnums=(0, 1, 2)), *args, cluster=mw.cluster("16x8 h100"))
    names = [s.primitive for s in traced.graph.columns.signatures]
    assert ATTENTION in names and ATTENTION.replace("fwd", "bwd") in names
    with pytest.raises(TraceError, match=r"cuDNN is not detected.*plan for a cluster of GPUs"):
        trace(loss, *args)


def test_a_kernel_that_refuses_the_planned_chip_says_so() -> None:
    wide = jax.ShapeDtypeStruct((4, 64, 8, 256), "bfloat16")

    def attention(q: Any) -> Any:
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    assert mw.plan(attention, wide, cluster="1x8 h100").mesh.num_devices == 8
    with pytest.raises(
        TraceError, match=r"head dim must be <= 128.*traced for a100-sxm-80gb.*such as the plain operations"
    ):
        mw.plan(attention, wide, cluster=f"1x8 {find_chip('a100-80gb').name}")


def test_a_chip_without_fused_attention_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    at_hand = SimpleNamespace(cudnn_get_version=lambda: 91100)
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", at_hand)

    def attention(q: Any) -> Any:
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    message = (
        r"from compute capability 8.0 on, and this chip has 7.0.*v100-32gb has no such kernel.*implementation=None"
    )
    with pytest.raises(TraceError, match=message):
        mw.plan(attention, QUERY, cluster="1x8 v100-32gb")
    with pytest.raises(TraceError, match=r"tpu-v5p has no such kernel.*implementation=None"):
        mw.plan(attention, QUERY, cluster="2x4 v5p")


def by_mesh(make: Any) -> Any:
    def function(x: Any, w: Any) -> Any:
        sharding = jax.sharding.NamedSharding(make(), jax.P("data", "model"))
        return jax.lax.with_sharding_constraint(x @ w, sharding)

    return function


def own_mesh(**options: Any) -> Any:
    return jax.make_mesh((4, 4), ("data", "model"), **options)


AUTO = {"axis_types": (jax.sharding.AxisType.Auto,) * 2}


@pytest.mark.parametrize("cluster", ["2x8 h100", "4x4 v5p", "4x4 v5e", "4x4 tpu-v4", "2x8 tpu-v3"])
def test_a_function_may_make_its_own_mesh_of_the_planned_devices(cluster: str) -> None:
    args, mesh = (jnp.ones((16, 8)), jnp.ones((8, 16))), {"data": 4, "model": 4}
    plan = mw.plan(by_mesh(lambda: own_mesh(**AUTO)), *args, cluster=cluster, mesh=mesh)
    assert plan.out_shardings == jax.P("data", "model")
    with pytest.raises(TraceError, match=r"explicit axes: constrain by mw.current_mesh\(\)"):
        mw.plan(by_mesh(lambda: own_mesh(axis_types=(jax.sharding.AxisType.Explicit,) * 2)), *args, cluster=cluster)


def test_tpus_have_places_in_their_torus() -> None:
    with traced_for(mw.cluster("4x4 v5p")):
        found = jax.eval_shape(lambda: [jnp.zeros(d.coords) for d in jax.devices()])
    assert len({leaf.shape for leaf in found}) == 16 and max(leaf.shape for leaf in found) == (1, 1, 3)
