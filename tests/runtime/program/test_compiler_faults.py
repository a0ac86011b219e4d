"""XLA's faults of docs/compiler-faults.md: each in plain JAX, where it is still there, and right under Meshwright.

A fault that a release mends makes its test fail; for a release that is not in `SEEN` it is skipped with that reason.
Then its workaround and its entry on the page can go.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.planner.pricing import pricer
from meshwright.runtime.spmd import spmd
from meshwright.strategy.candidates import Candidates, enumerate_candidates
from tests.runtime.test_spmd import run_once

pytestmark = pytest.mark.devices

SEEN = ("0.10.2",)  # releases of jaxlib in which every fault was seen
DEVICES = 4
CORRECTED = "src/meshwright/runtime/program/corrected.py"
VIRTUAL = "src/meshwright/runtime/program/virtual_values.py"
PER_DEVICE = "src/meshwright/runtime/program/per_device.py"
UNLIKE = "Look-ups whose arrays are split unlike are wrong or refused"
CHANNELS_LAST = ("NHWC", "HWIO", "NHWC")


@dataclass(frozen=True)
class Fault:
    """One fault of the compiler.

    Attributes:
        title: Its heading in docs/compiler-faults.md.
        function: A program that shows it.
        args: The program's arguments.
        specs: How they are split where it shows.
        where: The workaround.
        leads: The kind of loop that a plan must be made to split, where arguments alone do not decide; else empty.
        out: How the result is split where it shows; None for any way.
        mesh: Sizes of the mesh's axes, which are called x, y and z.
    """

    title: str
    function: Callable[..., Any]
    args: Sequence[Any]
    specs: Sequence[P]
    where: str = CORRECTED
    leads: str = ""
    out: P | None = None
    mesh: tuple[int, ...] = (DEVICES,)

    def __str__(self) -> str:
        return self.title


def _numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) - 5


def _with(value: float, *shape: int) -> np.ndarray:
    numbers = _numbers(*shape)
    numbers[(3,) + (1,) * (len(shape) - 1)] = value
    return numbers


def _look_up(table: Any, at: Any) -> Any:
    return table.at[at].get(mode="clip")


def _pools(x: Any) -> Any:
    def pool(start: float, function: Any) -> Any:
        return lax.reduce_window(x, np.float32(start), function, (3, 1), (1, 1), "SAME")

    return pool(0, lax.add), pool(-np.inf, lax.max), pool(np.inf, lax.min)


NAN, ZEROS, TABLE = _with(np.nan, 8, 2), np.array([-0.0, -0.0, 0.0, -0.0] * 2, np.float32), _with(-0.0, 64, 2)
ROWS, POSITIONS = _with(np.nan, 16, 2), np.tile(np.int32([0, 1, 1, 5]), 4)
COMPLEX = (_numbers(8, 2) * (1 - 1j)).astype(np.complex64)

WRONG = [
    Fault("Max and min drop NaN", lambda x: (x.max(0), x.min(0)), (NAN,), (P("x"),)),
    Fault("Max and min drop NaN", lambda x: (x.max(0), x.min(0)), (NAN.astype(np.float16),), (P("x"),)),
    Fault("Max and min take either of two zeros", lambda x: (x.max(), x.min()), (ZEROS,), (P("x"),)),
    Fault(
        "Max and min drop NaN",
        lambda table, at, rows: table.at[at].max(rows),
        (np.zeros((8, 2), np.float32), POSITIONS, ROWS),
        (P(), P("x"), P("x")),
        leads="max",
    ),
    Fault("Windows over one array share their padding", _pools, (-_numbers(16, 2) - 9,), (P("x"),)),
    Fault(
        "A slice begins beyond where it fits",
        lambda x, at: lax.dynamic_slice(x, (at, 0), (8, 2)),
        (_numbers(16, 2), np.int32(12)),
        (P("x"), P()),
        out=P("x"),
    ),
    Fault(
        "An update beyond the end is dropped",
        lambda x, at: lax.dynamic_update_slice(x, jnp.full((1, 2), 99.0), (at, 0)),
        (_numbers(8, 2), np.int32(11)),
        (P("x"), P()),
    ),
    Fault(
        "An update beyond the end is dropped",
        lambda x, at: lax.dynamic_update_slice(x, jnp.full((1, 2), 99.0), (jnp.minimum(at, -20), 0)),
        (_numbers(8, 2), np.int32(0)),
        (P("x"), P()),
    ),
    Fault(
        "Zeros that are looked up lose their sign",
        lambda table, at: table.at[at].get(mode="clip"),
        (TABLE, np.int32([3, 0, 70, -1])),
        (P("x"), P()),
        leads="sum",
    ),
    Fault(
        "Convolutions that are split by pixels and features are multiplied",
        lambda x, kernel: lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=CHANNELS_LAST),
        (_numbers(4, 8, 4, 2), _numbers(3, 3, 2, 4)),
        (P(None, "x"), P(None, None, None, "y")),
        where=PER_DEVICE,
        out=P(None, "x", None, "y"),
        mesh=(2, 2),
    ),
    Fault(
        UNLIKE,
        _look_up,
        (_numbers(8, 6), np.int32([1, 6, 3, 4])),
        (P("x"), P("z")),
        where=VIRTUAL,
        out=P(("x", "z")),
        mesh=(2, 2, 2),
    ),
]
REFUSED = [
    Fault(
        "Bitwise reductions and comparisons of complex numbers are refused",
        function,
        (operand,),
        (P("x"),),
        where="settled_as in src/meshwright/rules/base.py",
    )
    for function, operand in (
        (lambda x: lax.reduce_or(x, axes=(0,)), np.arange(16, dtype=np.int32).reshape(8, 2)),
        (lambda x: lax.reduce_and(x, axes=(0,)), np.arange(16, dtype=np.uint8).reshape(8, 2)),
        (lambda x: x.max(0), COMPLEX),
    )
]
REFUSED.append(
    Fault(
        UNLIKE,
        _look_up,
        (_numbers(8, 6), np.int32([1, 6, 3, 4])),
        (P(None, "z"), P("z")),
        where=VIRTUAL,
        out=P(("x", "y"), "z"),
        mesh=(2, 2, 2),
    )
)

CONVOLUTION = "Convolutions end the process"
# Its result is wanted split by rows, which its windows, with holes in them and between pixels, do not allow.
ABORTING = """
def function(x, scale):
    image, kernel = jnp.arange(16.).reshape(4, 2, 2, 1), jnp.broadcast_to(scale, (1, 1, 1, 4))
    return x * lax.conv_general_dilated(
        image, kernel, (3, 3), ((3, 3), (-1, 1)), (2, 3), (3, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )

args = np.ones((4, 3, 2, 4), np.float32), np.float32(2)
"""
PLAINLY = """
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
split = jax.sharding.NamedSharding(mesh, jax.P(None, None, "x"))
whole = jax.sharding.NamedSharding(mesh, jax.P())
jax.jit(function, in_shardings=(split, whole), out_shardings=split)(*args)
"""
PLANNED = """
import meshwright as mw
mesh = mw.Mesh.abstract((2,), alpha=0.0, beta=1e-9)
many = mw.parallelize(function, mesh=mesh, method=mw.Manual({"x": jax.P(None, None, "x")}))(*args)
np.testing.assert_allclose(many, jax.jit(function)(*args), rtol=1e-5)
"""

BETWEEN = "Convolutions that are cut off between two elements end the process"
CUTTING_OFF = """
def function(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1,), [(-1, 2)], lhs_dilation=(2,))

args = np.arange(8, dtype=np.float32).reshape(1, 1, 8), np.ones((1, 1, 1), np.float32)
"""

IN_FLIGHT = "Programs in flight end the process"
MANY_CALLS = """
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))  # all devices: each has its thread
split = jax.sharding.NamedSharding(mesh, jax.P("x"))
parts = [jax.device_put(np.full(64, i, np.float32), split) for i in range(60)]
for _ in range(%d):
    made = jax.block_until_ready([total(part) for part in parts])
assert [float(one) for one in made] == [64. * i for i in range(60)]
"""
PLAIN_TOTAL = "total = jax.jit(jnp.sum)\n"
PLANNED_TOTAL = """
import meshwright as mw
total = mw.parallelize(jnp.sum, mesh=mw.Mesh.abstract((8,), alpha=0., beta=1e-9), method=mw.Manual({"a": jax.P("x")}))
"""


def _same(one: Any, many: Any) -> bool:
    """Whether results agree: NaN where there is NaN, and zeros in their sign."""
    pairs = zip(map(np.asarray, jax.tree.leaves(one)), map(np.asarray, jax.tree.leaves(many)), strict=True)
    return all(
        np.array_equal(a, b, equal_nan=True)
        and (a.dtype.kind != "f" or np.array_equal(np.signbit(a) & ~np.isnan(a), np.signbit(b) & ~np.isnan(b)))
        for a, b in pairs
    )


def _plainly(fault: Fault) -> Any:
    names, devices = tuple("xyz"[: len(fault.mesh)]), jax.devices()[: np.prod(fault.mesh)]
    mesh = jax.make_mesh(fault.mesh, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(fault.args, fault.specs, strict=True)]
    out = None if fault.out is None else NamedSharding(mesh, fault.out)
    return jax.jit(fault.function, out_shardings=out)(*placed)


def _still_there(there: bool, fault: str, where: str) -> None:
    """Fails where a release that is known has mended a fault; one that is not says so by being skipped."""
    mended = f"jaxlib {version('jaxlib')} mended {fault!r}: remove the workaround in {where}"
    if not there and version("jaxlib") not in SEEN:
        pytest.skip(mended)
    assert there, mended


def test_the_page_has_every_fault():
    page = (Path(__file__).parents[3] / "docs/compiler-faults.md").read_text(encoding="utf-8")
    assert all(f"\n## {fault}\n" in page for fault in [*WRONG, *REFUSED, CONVOLUTION, BETWEEN, BEYOND, IN_FLIGHT])


@pytest.mark.parametrize("fault", WRONG, ids=str)
def test_the_compiler_still_gets_it_wrong(fault):
    _still_there(not _same(jax.jit(fault.function)(*fault.args), _plainly(fault)), str(fault), fault.where)


@pytest.mark.parametrize("fault", REFUSED, ids=str)
def test_the_compiler_still_refuses(fault):
    try:
        _plainly(fault)
    except jax.errors.JaxRuntimeError as error:
        assert "UNIMPLEMENTED" in str(error) or "Slice dim size" in str(error)
    else:
        _still_there(False, str(fault), fault.where)


def _only(kind: str) -> Callable[..., Candidates]:
    """Strategies that split a loop of a kind, where there are any."""

    def found(nest: Any, axes: Any, scatter: bool = True) -> Candidates:
        every = enumerate_candidates(nest, axes, scatter)
        kinds = np.array([*(loop.kind == kind for loop in nest.loops), False])
        chosen = kinds[every.loops].any(axis=1) & (every.scatter < 0).all(axis=1)
        return Candidates(every.loops[chosen], every.scatter[chosen]) if chosen.any() else every

    return found


@pytest.mark.parametrize("fault", [*WRONG, *REFUSED], ids=str)
def test_meshwright_gets_it_right(fault, monkeypatch):
    names = fault.function.__code__.co_varnames
    method = mw.Manual(dict(zip(names, fault.specs, strict=False)))
    if fault.out is not None:
        method = mw.Auto(fix=dict(zip((*names[: len(fault.args)], "out"), (*fault.specs, fault.out), strict=True)))
    if fault.leads:
        monkeypatch.setattr(pricer, "enumerate_candidates", _only(fault.leads))
        method = mw.Auto()
    plan = _holds(fault.function, fault.args, method, fault.mesh)
    assert not fault.leads or any(op.sums for op in plan.ops)


def _holds(function: Callable[..., Any], args: Sequence[Any], method: Any, shape: tuple[int, ...]) -> mw.Plan:
    """A plan whose results are those of one device, and whose collectives have the bytes that were planned."""
    plan = mw.plan(function, *args, mesh=mw.Mesh.abstract(shape, alpha=0.0, beta=1e-9), method=method)
    results, sent = run_once(plan, function, *args)
    assert _same(jax.jit(function)(*args), results)
    planned, compiled = (sum(getattr(pair, side) for pair in sent) for side in ("planned", "compiled"))
    assert compiled == pytest.approx(planned, rel=0.01), sent
    return plan


def _in_a_process(script: str) -> subprocess.CompletedProcess[str]:
    imports = "import jax, numpy as np, jax.numpy as jnp\nfrom jax import lax\n"
    return subprocess.run([sys.executable, "-c", imports + script], capture_output=True, text=True, timeout=300)


WINDOWS = "src/meshwright/rules/families/windows.py"


@pytest.mark.parametrize(
    ("fault", "where", "script"), [(CONVOLUTION, VIRTUAL, ABORTING), (BETWEEN, WINDOWS, CUTTING_OFF)]
)
def test_the_compiler_still_ends_the_process_over_a_convolution(fault, where, script):
    done = _in_a_process(script + PLAINLY)
    if done.returncode < 0:
        assert "Check failed" in done.stderr
    _still_there(done.returncode < 0, fault, where)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("script", [ABORTING, CUTTING_OFF], ids=["of broadcast values", "cut off between elements"])
def test_convolutions_stay_whole_where_their_rule_says_so(script):
    done = _in_a_process(script + PLANNED)
    assert done.returncode == 0, done.stderr


def _in_flight(script: str, seconds: int) -> subprocess.CompletedProcess[str]:
    prefix = "--xla_cpu_collective_call"
    timeouts = f"{prefix}_warn_stuck_timeout_seconds={seconds} {prefix}_terminate_timeout_seconds={seconds}"
    return _in_a_process(f"import os\nos.environ['XLA_FLAGS'] += ' {timeouts}'\n{script}")


@pytest.mark.skipif((os.cpu_count() or 1) > 8, reason="with more cores than devices the client has threads to spare")
def test_the_cpu_client_still_ends_the_process_over_programs_in_flight():
    done = _in_flight(PLAIN_TOTAL + MANY_CALLS % 200, 5)
    if done.returncode == 0:  # threads race for the last place: how often they lose depends on the machine
        pytest.skip(f"{IN_FLIGHT!r} was not met in 200 rounds: src/meshwright/runtime/cpu_turns.py may not be needed")
    assert done.returncode < 0 and "Termination timeout" in done.stderr


def test_calls_that_do_not_wait_for_each_other_run_one_after_another():
    done = _in_flight(PLANNED_TOTAL + MANY_CALLS % 20, 120)
    assert done.returncode == 0, done.stderr


def _one_row(x: Any, at: Any, row: Any) -> Any:
    return x.at[at].set(row), x.at[at].max(row)


ONE_ROW = (_numbers(8, 2), np.int32([5]), np.full((1, 2), 99, np.float32))


def test_the_compiler_still_reads_another_row_than_it_writes():
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    split = NamedSharding(mesh, P("x"))

    def spoilt(x: Any, at: Any, row: Any) -> Any:
        made = _one_row(lax.with_sharding_constraint(x, split), at, row)
        return [lax.with_sharding_constraint(y, split) for y in made]

    whole = NamedSharding(mesh, P())
    found, expected = jax.jit(spoilt, in_shardings=whole)(*ONE_ROW), _one_row(jnp.asarray(ONE_ROW[0]), *ONE_ROW[1:])
    there = any(not np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    _still_there(there, "One row that is written spoils rows of other devices", CORRECTED)


def test_one_row_is_written_and_no_other():
    plan = _holds(_one_row, ONE_ROW, mw.Manual({"x": P("x"), "at": P(), "row": P()}), (DEVICES,))
    assert all(tensor.spec == (("x",), ()) for tensor in plan.results)


ON_ONE_DEVICE = "What is wrong on one device, too"


def test_the_compiler_still_forgets_to_clamp_on_one_device():
    def cut(x: Any, at: Any) -> Any:
        return lax.dynamic_slice(lax.dynamic_slice(x, (at,), (8,)), (at,), (4,))

    x = jnp.arange(16)
    _still_there(not np.array_equal(jax.jit(cut)(x, 7), cut(x, 7)), ON_ONE_DEVICE, "docs/compiler-faults.md")
    plan = mw.plan(cut, x, 7, mesh=mw.Mesh.abstract((DEVICES,), alpha=0.0, beta=1e-9))
    np.testing.assert_array_equal(spmd(plan, cut)(x, 7), cut(x, 7))


def test_the_compiler_still_writes_what_it_is_yet_to_read_on_one_device():
    def shift(x: Any, at: Any) -> Any:
        return lax.dynamic_update_slice(x, x[:8][::-1], (at, 0)).reshape(16, 1, 4)

    x = jnp.arange(64).reshape(16, 4)
    _still_there(not np.array_equal(jax.jit(shift)(x, 0), shift(x, 0)), ON_ONE_DEVICE, "docs/compiler-faults.md")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only the maximum of x86 drops NaN")
def test_the_compiler_still_drops_nan_from_larger_arrays_on_one_device():
    x = np.full((24, 16, 24), 2, np.float32)
    x[6, 5, 2] = np.nan
    found = jax.jit(lambda x: x.max(1))(x)
    _still_there(not np.isnan(found[6, 2]), ON_ONE_DEVICE, "docs/compiler-faults.md")


BEYOND = "Convolutions read beyond an image that is cut off"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="seen on x86 alone")
def test_the_compiler_still_reads_beyond_an_image_on_one_device():
    image, kernel = _numbers(2, 4, 4), jnp.ones((1, 4, 2))
    found = jax.jit(lambda x: lax.conv_general_dilated(x, kernel, (1,), [(-1, 1)]))(image)
    _still_there(found[0, 0, 2] != image[0, :, 3].sum(), BEYOND, PER_DEVICE)
