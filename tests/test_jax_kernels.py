"""What JAX is told of other devices while it traces is told to one thread, in one context, and taken back."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src import xla_bridge
from jax._src.cudnn import fused_attention_stablehlo

import meshwright as mw
from meshwright.errors import TraceError
from meshwright.graph.tracing.planned_devices import traced_for

OURS = str(Path(mw.__file__).parent)
QUERY = jax.ShapeDtypeStruct((4, 64, 8, 64), "bfloat16")
GPUS, TPUS = "2x8 h100", "1x4 tpu-v5p"


def attention(q: Any) -> Any:
    return jax.nn.dot_product_attention(q, q, q, implementation="cudnn").astype("float32").sum()


def branch(x: Any) -> Any:
    return jax.lax.platform_dependent(x, cpu=lambda x: x + 1, cuda=lambda x: x + 2, tpu=lambda x: x + 3)


def told() -> tuple[str, int, int, str, int]:
    """What a function that is traced hears of the devices, and which branch is traced: 4 stands for all of them."""
    answers: list[Any] = []

    def function(x: Any) -> Any:
        devices = jax.devices()
        answers.extend((jax.default_backend(), len(devices), jax.process_count(), devices[0].device_kind))
        return branch(x)

    traced = str(jax.make_jaxpr(function)(0.0))
    chosen = 4 if "platform_index" in traced else next(n for n in (1, 2, 3) if f" {n}.0:" in traced)
    return (*answers, chosen)


AT_HAND = ("cpu", 8, 1, "cpu", 4)
ON_GPUS = ("gpu", 16, 2, "NVIDIA H100 80GB HBM3", 2)
ON_TPUS = ("tpu", 4, 1, "TPU v5p", 3)


def callables() -> dict[tuple[str, str], Any]:
    """Everything that can be called in the modules of JAX and on its primitives, by owner and name."""
    owners = {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "jax"}
    primitives = {
        f"{owner}.{name}": value
        for owner, module in owners.items()
        for name, value in vars(module).items()
        if isinstance(value, jax.extend.core.Primitive)
    }
    return {
        (owner, name): value
        for owner, holder in (owners | primitives).items()
        for name, value in vars(holder).items()
        if callable(value)
    }


def replaced() -> list[tuple[str, str]]:
    """The names in JAX behind which our code stands."""
    return [key for key, value in callables().items() if _file(value).startswith(OURS)]


def _file(value: Any) -> str:
    return str(getattr(getattr(value, "__code__", None), "co_filename", ""))


@contextmanager
def planning(cluster: str) -> Iterator[None]:
    """Another thread is in the middle of a trace for a cluster; its answers are checked at the start and the end."""
    answers: list[Any] = []
    begun, leave = Event(), Event()

    def trace_slowly() -> None:
        try:
            with traced_for(mw.cluster(cluster)):
                answers.append(told())
                begun.set()
                leave.wait(timeout=300)
                answers.append(told())
            answers.append(told())
        finally:
            begun.set()

    thread = Thread(target=trace_slowly)
    thread.start()
    assert begun.wait(timeout=300)
    try:
        yield
    finally:
        leave.set()
        thread.join()
    assert answers == [ON_GPUS if cluster == GPUS else ON_TPUS] * 2 + [AT_HAND]


def test_a_thread_that_runs_on_the_cpu_does_not_see_one_that_plans_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", None)  # as where JAX has no plug-in for CUDA
    assert not replaced()
    with planning(GPUS):
        assert replaced()
        assert told() == AT_HAND
        assert float(jax.jit(branch)(0.0)) == 1.0
        with pytest.raises(RuntimeError, match="cuDNN is not detected"):
            jax.eval_shape(attention, QUERY)
    assert not replaced()


def test_threads_that_plan_for_different_devices_do_not_see_each_other() -> None:
    with planning(GPUS):
        with planning(TPUS), traced_for(mw.cluster(GPUS)):
            assert told() == ON_GPUS
            jax.eval_shape(attention, QUERY)
        assert told() == AT_HAND  # who leaves first takes nothing away from the other
    assert not replaced()


def test_contexts_nest_and_end_with_an_exception() -> None:
    before = callables()
    with traced_for(mw.cluster(GPUS)):
        with pytest.raises(KeyError), traced_for(mw.cluster(TPUS)):
            assert told() == ON_TPUS
            raise KeyError
        assert told() == ON_GPUS
        with traced_for(None):
            assert told() == (*AT_HAND[:4], 1)
        assert told() == ON_GPUS
    assert told() == AT_HAND
    after = callables()
    assert not replaced() and [key for key in before if before[key] is not after.get(key)] == []


def refusing(x: Any) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize("function", [attention, refusing])
def test_after_a_plan_for_gpus_jax_is_as_it_was(function: Callable[[Any], Any]) -> None:
    before = callables()
    if function is refusing:
        with pytest.raises(TraceError, match="ZeroDivisionError"):
            mw.plan(function, QUERY, cluster="1x8 h100")
    else:
        assert mw.plan(function, QUERY, cluster="1x8 h100").mesh.num_devices == 8
    after = callables()
    assert [key for key in before if before[key] is not after.get(key)] == []
    assert not replaced()


def test_who_replaces_a_function_of_jax_meanwhile_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with traced_for(mw.cluster(GPUS)):
        ours = jax.process_count
        monkeypatch.setattr(jax, "process_count", lambda: 10 * ours())
        assert told()[2] == 20
    assert jax.process_count() == 10
    monkeypatch.undo()
    assert jax.process_count() == 1  # ours, which asks JAX
    jax.process_count = xla_bridge.process_count
    assert not replaced()


def test_what_jax_keeps_can_be_forgotten_while_a_thread_plans() -> None:
    with planning(GPUS):
        for lookup in (xla_bridge.get_backend, xla_bridge.local_devices, xla_bridge.process_count):
            lookup.cache_clear()
        assert told() == AT_HAND
        assert float(jnp.ones(4).sum()) == 4.0
