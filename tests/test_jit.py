"""Kernels are interpreted until compiling pays, and give the same numbers both ways."""

import os
import subprocess
import sys

import numpy as np
import pytest

import meshwright as mw
from meshwright import jit, zoo
from meshwright.jit import Kernel, compiling, inline, kernel, noting, pause
from meshwright.plan_files.storage import plan_to_json
from meshwright.progress import progress
from meshwright.solver.bounds.dual import Dual, move_messages
from meshwright.solver.bounds.memory_prices import highest
from meshwright.solver.bounds.unlimited_minimum import arrange, cheapest
from meshwright.solver.exact.bucket_elimination import eliminate
from meshwright.solver.exact.repair import repaired
from meshwright.solver.model.model import extent, from_problem
from meshwright.solver.reductions.simplify import simplify
from meshwright.solver.tuning import Tuning
from meshwright.solver.warm import example


@inline(plain=lambda numbers: numbers.sum())
def _sum(numbers):
    total = 0
    for number in numbers:
        total += number
    return total


@kernel
def _mean(numbers):
    return _sum(numbers) / len(numbers), len(numbers)


@pytest.fixture
def fresh():
    """A kernel without machine code, in this process or on disk."""
    made = kernel(_mean.function)
    made._is_on_disk = lambda: False
    return made


def test_a_kernel_is_interpreted_until_that_took_as_long_as_compiling(fresh):
    before = len(compiling.names)
    assert fresh(np.arange(5)) == (2.0, 5)
    assert not fresh.machine_code.overloads and fresh.spent_s > 0
    assert all(type(part) in (int, float) for part in fresh(np.arange(5)))
    fresh.spent_s = fresh.patience_s
    assert fresh(np.arange(5)) == (2.0, 5)
    assert len(fresh.machine_code.overloads) == 1 and compiling.names[before:] == [fresh.name]


def test_what_is_large_or_must_not_be_interpreted_is_compiled(fresh, monkeypatch):
    monkeypatch.setattr(jit, "_MOST_ELEMENTS", 4)
    assert fresh(np.arange(5)) == (2.0, 5)
    assert fresh.machine_code.overloads and fresh.spent_s == 0
    never = kernel(interpretable=False)(_mean.function)
    assert never(np.arange(5)) == (2.0, 5) and never.machine_code.overloads


def test_the_clock_of_solves_stands_still_while_kernels_are_compiled(fresh):
    fresh.spent_s = fresh.patience_s
    said: list[str] = []
    with progress(said.append) as say:
        say("adding up")
        before = compiling.seconds
        fresh(np.arange(5))
        earlier, clock, later = jit.now(), jit.clock(), jit.now()
    assert compiling.seconds > before and earlier <= clock + compiling.seconds <= later
    assert said[0] == said[2] == "adding up"
    assert said[1].startswith(f"compiling {fresh.name}, once on this machine: about")


@kernel
def _count(numbers):
    for i in range(len(numbers)):
        numbers[i] += 1
        pause()
    return numbers.sum()


def test_a_call_that_takes_too_long_is_abandoned_and_begins_again_compiled():
    made, numbers = kernel(pauses=True)(_count.function), np.arange(5)
    made._is_on_disk = lambda: False
    assert made(numbers) == 15 and not made.machine_code.overloads
    made.patience_s = made.spent_s + 1e-12
    assert made(numbers) == 20 and made.machine_code.overloads
    assert numbers.tolist() == [2, 3, 4, 5, 6]  # what the abandoned call had changed is as it was before


TINY = """
import jax, jax.numpy as jnp, meshwright as mw
from meshwright import jit
jit._COMPILE_S = 1e6  # however slow this machine is

def gradients(x, a):
    return x @ a, *jax.grad(lambda x, a: ((x @ a) ** 2).sum(), (0, 1))(x, a)

x = jnp.ones((8, 8))
plan = mw.plan(gradients, x, x, mesh=mw.Mesh.abstract((2,), alpha=100.0, beta=0.01))
print(plan.solution.status, jit.compiling.names)
"""


@pytest.mark.slow
def test_a_tiny_plan_waits_for_no_kernel(tmp_path):
    settings = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "MESHWRIGHT_COMPILE_BESIDE": "0"}
    found = subprocess.run([sys.executable, "-c", TINY], capture_output=True, text=True, check=False, env=settings)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["optimal", "[]"]


@pytest.mark.parametrize("num_edges", [0, 1, 2])
def test_kernels_are_called_with_arrays_of_one_type_however_few_edges_there_are(num_edges):
    edges = [(0, 1, np.eye(2)), (1, 2, np.eye(2)), (0, 2, np.eye(2))]
    usages, intervals = [[1, 2]] * 3, [(0, 3)] * 3

    def noted(some):
        problem = mw.ChoiceProblem(costs=[[1, 2]] * 3, usages=usages, intervals=intervals, edges=some, limit=5)
        with noting() as found:
            simplify(from_problem(problem))
        return found.keys()

    assert noted(edges[:num_edges]) <= noted(edges)


def _compiled(make, *args):
    """What is made where no kernel is interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "_MOST_ELEMENTS", -1)
        return make(*args)


def _interpreted(make, *args):
    """What is made where every kernel is, those with machine code as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "__call__", lambda self, *args: self._interpret(*args))
        return make(*args)


def _reduced(problem):
    """What is left of a problem, and what leads back from it."""
    simple = simplify(from_problem(problem), tuning=Tuning(growth=1.0))
    choice = np.zeros(simple.model.num_nodes, dtype=np.int64)
    return [*simple.model, simple.offset, [] if simple.infeasible else simple.expand(choice)]


def _swept(problem):
    """The messages of a few sweeps with prices, and all that is read off them."""
    model = from_problem(problem)
    dual = Dual(model)
    links, found = dual.links, [extent(model.mat, 1e9)]
    for price in (0.0, 0.1):
        dual.set_prices(np.full(len(model.cap), price))
        found += [dual.sweep() for _ in range(3)]
    settled = model.cost.copy(), np.empty_like(model.mat)
    move_messages(model.off, model.eu, model.ev, model.eoff, model.mat, links.of_edge, dual.m, *settled)
    return [*found, *links, dual.m, dual.reduced, dual.floor, dual.load(), dual.spent(), dual.decode(), *settled]


def _closed(problem):
    """What an elimination, a repair and the best prices come to."""
    model = from_problem(problem)
    dual = Dual(model)
    dual.sweep()
    found = eliminate([dual], 1.3 * dual.bound, 300.0)
    buckets = arrange(dual.links, model.off, np.ones(len(model.cost), bool), 1e6)
    buckets = buckets._replace(scope=buckets.scope[: buckets.first[-1]])  # the rest is room that is not used
    least = cheapest(dual.links, model.off, dual.theta, buckets) if np.isfinite(buckets.combinations) else ()
    fitting = repaired(model, dual.links, dual.decode())
    slopes, values = np.sin(np.arange(12.0)).reshape(4, 3), np.cos(np.arange(4.0))
    prices = highest(slopes, values, np.ones(3), 0.7, 30)
    choice = [] if found.choice is None else found.choice
    return [choice, found.num_rows, found.reached, *buckets, *least, fitting.choice, fitting.load, prices]


@pytest.mark.parametrize("make", [_reduced, _swept, _closed])
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_interpreted_kernels_give_the_same_bits(make, memory, seed):
    small = {"num_nodes": 10, "num_states": 3} if make is _closed else {"num_nodes": 24, "num_states": 7}
    problem = example(memory, **small, seed=seed)
    for one, other in zip(_compiled(make, problem), _interpreted(make, problem), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_plans_do_not_depend_on_whether_kernels_are_compiled():
    model = zoo.build("mlp", batch=64)

    def planned():
        return plan_to_json(mw.plan(model.train_step, model.state, model.batch, cluster="2x4 h100"))

    assert _interpreted(planned) == _compiled(planned)


LIMIT = 3


def _plus(number):
    return number + 1


@inline(plain=_plus)
def _next(number):
    return number + 1


@kernel
def _stepped(numbers):
    return _next(numbers[0]) + LIMIT


def test_machine_code_is_stale_when_what_a_kernel_calls_or_names_has_changed(monkeypatch):
    def stamp():
        return jit._stamp(_stepped.function, _stepped.options)

    before = stamp()
    assert stamp() == before
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "LIMIT", 4)
        assert stamp() != before
    with monkeypatch.context() as patch:
        patch.setattr(_next, "py_func", lambda number: number + 2)
        assert stamp() != before
    with monkeypatch.context() as patch:
        patch.setattr(_stepped, "options", {**_stepped.options, "fastmath": False})
        assert stamp() != before
    monkeypatch.setitem(globals(), "_plus", None)  # what only interprets
    assert stamp() == before


def test_an_index_that_cannot_be_read_is_removed_and_counts_as_none(tmp_path):
    """Its keys name classes; those of an earlier version may have moved."""

    class Stale:
        _index_path = str(tmp_path / "kernel.nbi")

        def _load_index(self):
            raise AttributeError("Can't get attribute 'Model'")

    made = kernel(_mean.function)
    made.machine_code._cache._cache_file = Stale()
    (tmp_path / "kernel.nbi").write_bytes(b"stale")
    assert not made.is_kept
    assert not (tmp_path / "kernel.nbi").exists()
