"""Plans a function: trace, group, fold, then formulate and solve on each mesh view, and read the best choice back."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

import meshwright
from meshwright.errors import DoesNotFit, ShardingError
from meshwright.graph import Traced, trace
from meshwright.graph.liveness import liveness
from meshwright.hardware import Cluster, Mesh
from meshwright.hardware import cluster as find_cluster
from meshwright.planner.folding import fold
from meshwright.planner.formulate import Formulation
from meshwright.planner.groups import Grouping
from meshwright.planner.methods import Auto, Method
from meshwright.planner.plan import Considered, Cost, Memory, Plan, SolutionSummary, Tensor
from meshwright.planner.readback import Readback
from meshwright.planner.roles import find_roles
from meshwright.planner.structure import skeleton
from meshwright.rules import has_rule, kernel_name
from meshwright.solver import Solution, solve
from meshwright.solver.bounds import lower_bound
from meshwright.strategy.sharding import Axes
from meshwright.units import format_bytes

Progress = Callable[[str], None]

_MAX_ROUNDS = 24
_SOLVE_SECONDS = 20.0


def plan(
    function: Callable[..., Any],
    *args: Any,
    cluster: Cluster | str | None = None,
    mesh: Mesh | tuple[int, ...] | None = None,
    method: Method | None = None,
    on_progress: Progress | None = None,
) -> Plan:
    """Finds how to split a function's tensors over a cluster.

    Args:
        function: An ordinary single-device JAX function: a train step, a forward pass.
        *args: Its arguments: pytrees of arrays or `jax.ShapeDtypeStruct`; nothing is computed or allocated.
        cluster: A `Cluster` or what `mw.cluster` takes; the local devices if neither this nor a mesh is given.
        mesh: One logical mesh, or its shape on the cluster, instead of all views of the cluster.
        method: `Auto` by default.
        on_progress: Called with a sentence on each stage.

    Returns:
        The plan.

    Raises:
        TraceError: JAX could not trace the function.
        DoesNotFit: No plan fits the memory; it names the least memory that would do.
        ShardingError: A method or fixed sharding asks for what the shapes or the mesh do not allow.
    """
    method = method if method is not None else Auto()
    if not isinstance(method, Method):
        raise ShardingError(f"method is {method!r}; give mw.Auto(), mw.DataParallel(), mw.Zero(…) or another method")
    meshes = _meshes(cluster, mesh, method)
    say = on_progress or (lambda _: None)
    say("tracing")
    task = Task(trace(function, *args), method)
    return task.plan(meshes, say)


def _meshes(cluster: Cluster | str | None, mesh: Mesh | tuple[int, ...] | None, method: Method) -> list[Mesh]:
    if isinstance(mesh, Mesh):
        return [mesh]
    machine = find_cluster("local" if cluster is None else cluster) if not isinstance(cluster, Cluster) else cluster
    return [machine.mesh(tuple(mesh))] if mesh is not None else method.meshes(machine)


@dataclass(frozen=True)
class Solved:
    """The best choice found on one mesh."""

    formulation: Formulation
    choice: NDArray[np.int64]
    solution: Solution
    peak_bytes: int
    seconds: float


class Task:
    """A traced function and a method: all that does not depend on the mesh."""

    def __init__(self, traced: Traced, method: Method, folding: bool = True):
        self.traced = traced
        self.method = method
        self.graph = traced.graph
        self.grouping = Grouping(self.graph)
        self.roles = find_roles(self.graph)
        self.live = liveness(self.graph, self.grouping.nests)
        self.folded = fold(self.grouping, method.pins(self.graph, self.roles), folding)

    def formulate(self, mesh: Mesh) -> Formulation:
        """The choice problem on one mesh."""
        axes = Axes(mesh.sizes)
        restrictions = self.method.restrict(self.graph, self.roles, mesh, axes)
        return Formulation(self.grouping, self.folded, self.live, mesh, restrictions)

    def limit(self, mesh: Mesh) -> float | None:
        """Bytes that the plan may use on each device."""
        if mesh.memory_bytes is None:
            return None
        return mesh.memory_bytes * (1.0 if mesh.is_abstract else self.method.memory_fraction)

    def plan(self, meshes: list[Mesh], say: Progress) -> Plan:
        """Solves on each mesh and makes the plan of the best."""
        best: Solved | None = None
        misfits: list[DoesNotFit] = []
        refused: list[ShardingError] = []
        considered: list[Considered] = []
        for mesh in meshes:
            say(f"solving on {'×'.join(map(str, mesh.sizes))}")
            try:
                solved = self.solve(mesh)
            except DoesNotFit as misfit:
                misfits.append(misfit)
                considered.append(Considered(mesh.sizes, None, misfit.needed_bytes, "does not fit"))
                continue
            except ShardingError as error:
                if len(meshes) == 1:
                    raise
                refused.append(error)
                considered.append(Considered(mesh.sizes, None, None, str(error)))
                continue
            considered.append(Considered(mesh.sizes, float(solved.solution.cost), solved.peak_bytes, ""))
            if best is None or solved.solution.cost < best.solution.cost * (1 - 1e-9):
                best = solved
        if best is None:
            if misfits:
                raise min(misfits, key=lambda m: m.needed_bytes)
            raise refused[0]
        say("reading the plan back")
        return self._read_back(best, considered)

    def solve(self, mesh: Mesh) -> Solved:
        """The best choice on one mesh: memory is held at the times that turn out to need it."""
        started = time.perf_counter()
        formulation = self.formulate(mesh)
        limit = self.limit(mesh)
        times: dict[int, float] = {}
        for _ in range(_MAX_ROUNDS):
            solution = solve(formulation.problem(times, limit if times else None), seconds=_SOLVE_SECONDS, workers=1)
            if solution.choice is None:
                raise self._does_not_fit(formulation, times, limit or 0.0)
            back = Readback(formulation, solution.choice)
            copies = back.copies()
            profile = formulation.memory.profile(solution.choice, copies)
            if limit is None or profile.peak_bytes <= limit:
                return Solved(formulation, solution.choice, solution, profile.peak_bytes, time.perf_counter() - started)
            before = dict(times)
            for moment in _peaks(profile.bytes_at, limit):
                reserve = sum(size for start, stop, size in copies if start <= moment < stop)
                times[moment] = max(times.get(moment, 0.0), reserve)
            if times == before:  # the model's rows hold, yet the profile does not: keep more free at the peak
                times[profile.peak_at] += profile.peak_bytes - limit
        raise self._does_not_fit(formulation, times, limit or 0.0)

    def _does_not_fit(self, formulation: Formulation, times: dict[int, float], limit: float) -> DoesNotFit:
        needed = self._least_memory(formulation, times, limit)
        mesh = formulation.mesh
        return DoesNotFit(
            f"no plan fits {format_bytes(limit)} per device on mesh {mesh.shape}: the least that would do is "
            f"{format_bytes(needed)}. Use more devices, a smaller batch, jax.checkpoint around the layers, or devices "
            "with more memory.",
            needed_bytes=needed,
            limit_bytes=int(limit),
        )

    def _least_memory(self, formulation: Formulation, times: dict[int, float], limit: float) -> int:
        """The least peak found when memory is all that counts; the peak's own times are added until it stays."""
        moments = dict(times)
        best = np.inf
        for _ in range(6):
            choice = _lightest(formulation, moments)
            profile = Readback(formulation, choice).profile()
            best = min(best, profile.peak_bytes)
            if profile.peak_at in moments:
                break
            moments[profile.peak_at] = 0.0
        return int(max(best, limit + 1))

    def _read_back(self, solved: Solved, considered: list[Considered]) -> Plan:
        back = Readback(solved.formulation, solved.choice)
        profile = back.profile()
        collectives = tuple(back.collectives())
        cost = Cost(back.compute(), sum(c.seconds for c in collectives))
        bound = min(lower_bound(solved.formulation.unfolded()), cost.total)
        mesh = solved.formulation.mesh
        limit = self.limit(mesh)
        arguments = tuple(self._arguments(back))
        return Plan(
            mesh=mesh,
            method=self.method.name,
            cost=cost,
            memory=Memory(
                profile.peak_bytes,
                None if limit is None else int(limit),
                self._argument_bytes(back),
                self.graph.ops[profile.peak_at].label if self.graph.ops else "",
            ),
            solution=SolutionSummary(
                solved.solution.status.value,
                bound,
                (cost.total - bound) / cost.total if cost.total > 0 else 0.0,
                solved.seconds,
            ),
            arguments=arguments,
            results=tuple(self._results(back)),
            collectives=collectives,
            ops=tuple(back.op_plans()),
            unsplittable=self.unsplittable,
            considered=tuple(considered),
            provenance=self._provenance(mesh),
            in_structure=skeleton(self.traced.in_tree, len(arguments)),
            out_structure=skeleton(self.traced.out_tree, len(self.graph.outputs)),
            in_tree=self.traced.in_tree,
            out_tree=self.traced.out_tree,
        )

    @cached_property
    def unsplittable(self) -> tuple[str, ...]:
        """Primitives that are planned without a rule."""
        signatures = {id(op.signature): op.signature for op in self.graph.ops}
        return tuple(sorted({kernel_name(s) for s in signatures.values() if not has_rule(s)}))

    def _arguments(self, back: Readback) -> Iterator[Tensor]:
        roles = dict.fromkeys(self.roles.parameters, "parameters") | dict.fromkeys(self.roles.optimizer, "optimizer")
        for place in self.traced.in_leaves:
            if place is None:  # a leaf that is not an array: handed through as it is
                yield Tensor("", (), "", (), "static")
                continue
            value = self.graph.inputs[place]
            kind = self.graph.types[value]
            spec = back.spec(back.code(value), len(kind.shape))
            yield Tensor(self.graph.input_paths[place], kind.shape, kind.dtype, spec, roles.get(value, "data"))

    def _results(self, back: Readback) -> Iterator[Tensor]:
        for output, value in enumerate(self.graph.outputs):
            kind = self.graph.types[value]
            code = back.formulation.restrictions.results.get(output)
            if output in self.graph.state:
                code = back.code(self.graph.inputs[self.graph.state[output]])
            elif code is None:
                code = back.code(value)
            role = "state" if output in self.graph.state else "result"
            yield Tensor(
                self.graph.output_paths[output], kind.shape, kind.dtype, back.spec(code, len(kind.shape)), role
            )

    def _argument_bytes(self, back: Readback) -> dict[str, int]:
        named = {"parameters": self.roles.parameters, "optimizer": self.roles.optimizer, "data": self.roles.data}
        parts = back.axes.num_parts
        return {
            name: int(sum(self.graph.types[v].num_bytes / float(parts(back.code(v))) for v in values))
            for name, values in named.items()
        }

    def _provenance(self, mesh: Mesh) -> dict[str, Any]:
        import jax

        where = "abstract mesh" if mesh.is_abstract else "modelled: catalogue figures, roofline and α–β"
        loops = "assumed: one trip for each while loop" if any(o.primitive == "while" for o in self.graph.ops) else ""
        notes = {"meshwright": meshwright.__version__, "jax": jax.__version__, "costs": where}
        return notes | ({"loops": loops} if loops else {})


def _peaks(bytes_at: NDArray[np.float64], limit: float) -> list[int]:
    """The highest moment, and the highest of each other stretch that is over the limit."""
    over = np.flatnonzero(bytes_at > limit)
    stretches = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    tops = sorted((int(s[np.argmax(bytes_at[s])]) for s in stretches if len(s)), key=lambda t: -bytes_at[t])
    return tops[:4]


def _lightest(formulation: Formulation, moments: dict[int, float]) -> NDArray[np.int64]:
    """The choice that takes least memory, summed over some moments, each class by itself."""
    choice = np.zeros(len(formulation.costs), np.int64)
    totals: list[NDArray[np.float64]] = [np.zeros(len(c)) for c in formulation.costs]
    for moment in moments:
        for which, usage in enumerate(formulation.memory.usage(moment, len(totals))):
            if usage is not None:
                totals[which] = totals[which] + usage
    for which, total in enumerate(totals):
        choice[which] = int(np.lexsort((formulation.costs[which], total))[0])
    return choice
