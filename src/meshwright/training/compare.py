"""`mw.compare`: plans one function by several methods with the same cost model, and compiles and times each plan."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef, tree_flatten, tree_leaves, tree_structure, tree_unflatten

from meshwright.errors import ClusterError, DoesNotFit, ShardingError
from meshwright.facade import Plan
from meshwright.hardware import Cluster, Mesh
from meshwright.parallelism.subject.subject import Subjects
from meshwright.planner.method_names import METHOD_NAMES, find_methods
from meshwright.planner.methods import AUTO, Method
from meshwright.runtime.checking.compiled import collectives_of, text_of
from meshwright.runtime.checking.verify import allocated_bytes
from meshwright.runtime.checking.verify_stages import verify_program
from meshwright.runtime.placement import argument_shardings
from meshwright.runtime.processes.sharing import put
from meshwright.runtime.stages.pipeline_program import PipelineProgram
from meshwright.training.comparison import ComparedMethod, Comparison
from meshwright.training.parallelize import Parallelized, parallelize

METHODS: tuple[Method, ...] = tuple(METHOD_NAMES.values())
_ROUNDS = 5  # each method runs once in each, so that a slow phase of the machine affects all of them

Progress = Callable[[str], None]


def compare(
    function: Callable[..., Any],
    *args: Any,
    methods: str | Sequence[Method | str] | None = None,
    cluster: Cluster | str | None = None,
    mesh: Mesh | tuple[int, ...] | None = None,
    steps: int = 10,
    run: bool = True,
    on_progress: Progress | None = None,
) -> Comparison:
    """Plans a function by several methods and, if the devices are available, compiles and times them.

    The arguments are copied, never donated. One method's copy is in memory at a time.

    Args:
        function: A train step, plain or made by `mw.parallelize`, whose settings then apply except for the method.
        *args: Its arguments, such as a state and a batch. With `jax.ShapeDtypeStruct`s the methods are planned and
            compiled, but not timed.
        methods: Methods or their short names, such as ``["auto", "zero3"]``; `mw.Auto()`, data
            parallel, ZeRO 1 to 3 and tensor parallel by default.
        cluster: What `mw.plan` takes; the function's own, or the local devices, by default.
        mesh: One logical mesh, or its shape on the cluster, for all methods, instead of each method's own.
        steps: How many steps of each method are timed; with 0 they are compiled only.
        run: False only plans.
        on_progress: Called with a sentence on each stage.

    Returns:
        The comparison: it prints as a table. A method that does not fit or that the shapes do not allow is a row that
        says why.

    Examples:
        >>> import jax.numpy as jnp, meshwright as mw
        >>> step = lambda w, x: (w - x.T @ (x @ w), x.sum())
        >>> found = mw.compare(step, jnp.ones((8, 4)), jnp.ones((16, 8)), methods=[mw.Auto(), mw.Zero(3)],
        ...                    cluster="1x8 h100", run=False)
        >>> [row.method for row in found.rows]
        ['Auto', 'Zero-3']
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ShardingError(f"steps is {steps!r}; give how many steps to time, 0 or more")
    say = on_progress or (lambda _: None)
    candidates = []
    for method in METHODS if methods is None else find_methods(methods):
        step = _with_method(function, method, cluster, mesh)
        say(f"planning by {method.name}")
        candidates.append(_planned(step, method, args))
    if not run:
        return Comparison(tuple(c.row for c in candidates), 0)
    for candidate in candidates:
        if candidate.plan is not None:
            say(f"compiling {candidate.row.method}")
            candidate.compile(args)
    ready = [c for c in candidates if c.compiled is not None]
    are_types = any(isinstance(x, jax.ShapeDtypeStruct) for x in tree_leaves(args))
    note = "not timed: the arguments are types; give arrays" if are_types else ""
    if ready and steps and not note:
        _time(ready, args, steps, say)
    timed = any(c.row.measured_s is not None for c in candidates)
    return Comparison(tuple(c.row for c in candidates), steps if timed else 0, note if steps else "")


def _with_method(function: Callable[..., Any], method: Method, cluster: Any, mesh: Any) -> Parallelized:
    if not isinstance(function, Parallelized):
        return parallelize(function, cluster=cluster, mesh=mesh, method=method)
    if method.microbatches == AUTO and not method.staged:
        method = replace(method, microbatches=function.settings.method.microbatches)
    settings = replace(function.settings, method=method)
    if cluster is not None or mesh is not None:
        settings = replace(settings, cluster=cluster, mesh=mesh)
    return Parallelized(function.function, settings)


@dataclass
class _Candidate:
    """A method on its way through the comparison.

    Attributes:
        step: The function by this method.
        row: The figures known so far.
        compiled: Its program, once it is compiled.
        times: Seconds of each step that was timed.
    """

    step: Parallelized
    row: ComparedMethod
    compiled: Any = None
    times: list[float] = field(default_factory=list)

    @property
    def plan(self) -> Plan | None:
        return self.row.plan

    def compile(self, args: Sequence[Any]) -> None:
        """Compiles the program, and notes its memory and collectives."""
        assert self.plan is not None
        try:
            compiled = self.step.program(*args) if self.plan.stages else self.step.lower(*args).compile()
        except (ClusterError, ShardingError) as error:  # too few devices, or a step that cannot be cut
            self.row = replace(self.row, reason=f"not run: {error}")
        except jax.errors.JaxRuntimeError as error:
            self.row = replace(self.row, reason=_out_of_memory(error, "compiled"))
        else:
            self.compiled = compiled
            peak, sent = _bytes(compiled, self.plan)
            self.row = replace(self.row, compiled_peak_bytes=peak, compiled_collective_bytes=sent)

    def run(self, args: Sequence[Any], steps: int) -> None:
        """Runs one step to warm up, then the steps that are timed."""
        try:
            self._run(args, steps)
        except jax.errors.JaxRuntimeError as error:
            self.row = replace(self.row, reason=_out_of_memory(error, "run"))

    def _run(self, args: Sequence[Any], steps: int) -> None:
        assert self.plan is not None
        given = _placed(self.plan, self.step, args)
        for number in range(steps + 1):
            started = time.perf_counter()
            results = jax.block_until_ready(self.compiled(*given))
            if number:
                self.times.append(time.perf_counter() - started)
            following = _following(given, results)
            given = _placed(self.plan, self.step, args) if following is None else following


def _planned(step: Parallelized, method: Method, args: Sequence[Any]) -> _Candidate:
    try:
        plan = step.plan(*args)
    except (DoesNotFit, ShardingError) as error:
        return _Candidate(step, ComparedMethod(method.name, reason=str(error)))
    sent = [subject.collectives for subject in Subjects(plan)] if plan.stages else [plan.collectives]
    row = ComparedMethod(
        method=plan.method,
        mesh=_shape(plan),
        predicted_s=plan.step_s,
        predicted_peak_bytes=plan.memory.peak_bytes,
        predicted_collective_bytes=int(max(sum(c.bytes * c.trips for c in some) for some in sent)),
        plan=plan,
    )
    return _Candidate(step, row)


def _shape(plan: Plan) -> dict[str, int]:
    """The mesh of a plan; of stages that have meshes of one shape, their number and that shape."""
    shapes = [stage.mesh.shape for stage in plan.stages]
    alike = shapes and all(shape == shapes[0] for shape in shapes)
    return {"stages": len(shapes), **shapes[0]} if alike else dict(plan.mesh.shape)


def _bytes(compiled: Any, plan: Plan) -> tuple[int | None, int]:
    """Bytes that a program takes on one device, and that it sends; of a pipeline, those of its fullest stages."""
    if isinstance(compiled, PipelineProgram):
        verification = verify_program(compiled)
        return int(verification.memory.compiled), int(max(stage.bytes.compiled for stage in verification.stages))
    collectives = collectives_of(text_of(compiled), plan.mesh.shape)
    peak = None if compiled.memory_analysis() is None else allocated_bytes(compiled)  # not every backend reports it
    return peak, sum(c.bytes * c.trips for c in collectives)


def _time(candidates: Sequence[_Candidate], args: Sequence[Any], steps: int, say: Progress) -> None:
    rounds = min(_ROUNDS, steps)
    for number in range(rounds):
        say(f"running, round {number + 1} of {rounds}")
        for candidate in candidates:
            if not candidate.row.reason:
                candidate.run(args, steps // rounds + (number < steps % rounds))
    for candidate in candidates:
        if candidate.times and not candidate.row.reason:
            candidate.row = replace(candidate.row, measured_s=median(candidate.times))


def _placed(plan: Plan, step: Parallelized, args: Sequence[Any]) -> tuple[Any, ...]:
    """Copies of the arguments in the plan's shardings, as its compiled program takes them."""
    leaves, tree = tree_flatten(tuple(a for i, a in enumerate(args) if i not in step.settings.static_argnums))
    kept = [i for i, tensor in enumerate(plan.arguments) if tensor.role != "static"]
    # Arrays that have their sharding already are copied, too: the program may take over their memory.
    copies = [x.copy() if isinstance(x, jax.Array) else x for x in leaves]
    shardings = argument_shardings(plan)
    placed = [i for i in kept if shardings[i] is not None]  # a pipeline takes its batch as it comes
    filled = [array if i in kept else None for i, array in enumerate(copies)]
    for i, array in zip(placed, put([copies[i] for i in placed], [shardings[i] for i in placed]), strict=True):
        filled[i] = array
    return tree_unflatten(tree, filled)


def _following(args: Sequence[Any], made: Any) -> tuple[Any, ...] | None:
    """The arguments of the next step, with results in place of donated arguments; None where one has no such result."""
    results = list(made) if isinstance(made, tuple | list) else [made]
    following = []
    for arg in args:
        if not any(isinstance(x, jax.Array) and x.is_deleted() for x in tree_leaves(arg)):
            following.append(arg)
            continue
        match = next((i for i, result in enumerate(results) if _types(result) == _types(arg)), None)
        if match is None:
            return None
        following.append(results.pop(match))
    return tuple(following)


def _types(value: Any) -> tuple[PyTreeDef, list[tuple[tuple[int, ...], np.dtype]]]:
    return tree_structure(value), [(x.shape, x.dtype) for x in tree_leaves(value)]


def _out_of_memory(error: Exception, what: str) -> str:
    """Why a program could not be compiled or run where memory is the cause; other causes are raised."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    return f"ran out of memory when {what}: {str(error).strip().splitlines()[0]:.200}"
