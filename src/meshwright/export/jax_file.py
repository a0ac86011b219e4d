"""Writes a plan as one Python file of plain JAX, for a code base that does not use Meshwright.

The file is `exported_plan.py` with the plan's values in the place of the example's.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import OutputError
from meshwright.names import one_line
from meshwright.output import write_whole
from meshwright.parallelism.sentence import plain_sentence
from meshwright.parallelism.words import label_words
from meshwright.plans.compiler_options import platform_of
from meshwright.plans.records.record import Record
from meshwright.plans.tensor import Spec, Tensor
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from meshwright.plans.plan import OpPlan, PlanData
    from meshwright.plans.records.traced_program import RecordedProgram

FORMATS = ("jax",)
_DEFINITION = re.compile(r"(\w+)(?:: .*?)? = ")
_NUMBER = re.compile(r"\d+")

Activation = tuple[str, tuple[int, ...]]  # scopes and primitive, and the shape behind the first dim


def export(plan: "PlanData", to: str, path: Path) -> None:
    """See `Plan.export`."""
    if to not in FORMATS:
        raise OutputError(f"plans are exported to {' or '.join(map(repr, FORMATS))}, not to {to!r:.60}")
    write_whole(path, jax_file(plan))


def jax_file(plan: "PlanData") -> str:
    """The text of the file.

    Raises:
        OutputError: The plan is more than one program.
    """
    if plan.stages:
        raise OutputError(
            f"the plan is a pipeline of {len(plan.stages)} stages, which are several programs that send each other "
            "activations, and jax.jit runs one: plan with mw.Auto(pipeline=False) to export it, or run it by "
            "mw.parallelize(function, method=plan)"
        )
    values = _values(plan)
    example = Path(__file__).with_name("exported_plan.py").read_text(encoding="utf-8")
    lines = [_with_value(line, values) for line in example.partition('"""\n')[2].splitlines()]
    return "\n".join([_opening(plan), *lines, ""])


def _with_value(line: str, values: Mapping[str, str]) -> str:
    """A line of the example; where it defines one of the values, with the plan's."""
    found = _DEFINITION.match(line)
    return found[0] + values[found[1]] if found is not None and found[1] in values else line


def _opening(plan: "PlanData") -> str:
    model = plan.provenance.get("model") or "a function"
    where = "" if plan.mesh.cluster is None else f" of {plan.mesh.cluster.name}"
    axes = " × ".join(f"{name}={size}" for name, size in plan.mesh.shape.items())
    said = f"{model} on mesh {axes}{where}: {plain_sentence(plan)}"
    said = one_line(said).replace("\\", "/").replace('"', "'")
    version = plan.provenance.get("meshwright", "")
    lines = [f"{said}.", "", f"Written by Meshwright {version}. The end of the file says how to use it."]
    if plan.memory.host_bytes:
        lines += [
            f"The plan keeps {format_bytes(plan.memory.host_bytes)} of each device on its host; this file does not.",
            "Give your layers a policy such as `jax.checkpoint_policies.save_and_offload_only_these_names`, or plan",
            "for more microbatches.",
        ]
    return '"""' + "\n".join(lines) + '\n"""'


def _values(plan: "PlanData") -> dict[str, str]:
    """The text of each value of the file, by its name."""
    arguments = [t for t in plan.arguments if t.role != "static"]
    parameters = [t for t in arguments if t.role == "parameters"]
    others = [t for t in (*arguments, *plan.results) if t.role not in ("parameters", "static")]
    names, donated = _arguments(plan)
    home = _common_home([t.path for t in parameters]) or names[0]
    gradients = {t.path: _gradient(t, home, arguments) for t in parameters}
    policy, recomputed = _recomputation(plan)
    return {
        "AXES": repr(dict(plan.mesh.shape)),
        "ARGUMENTS": repr(names),
        "DONATED": repr(donated),
        "param_specs": _table(_short({t.path: t.spec for t in parameters})),
        "grad_specs": _table(_short(gradients)),
        "other_specs": _table(_short({t.path: t.spec for t in others})),
        "activation_specs": _table(_activations(plan)),
        "PARAMETERS": repr(home),
        "MICROBATCHES": repr(plan.microbatches),
        "POLICY": repr(policy),
        "RECOMPUTED": repr(recomputed),
        "COMPILER_OPTIONS": repr({platform_of(plan.mesh.chip): plan.compiler_options} if plan.compiler_options else {}),
    }


def _arguments(plan: "PlanData") -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The names of the arguments, as paths begin with them, and the positions of those that are donated."""
    import jax

    from meshwright.runtime.spmd import argument_leaves, donated_arguments

    tree = jax.tree_util.tree_structure(plan.in_shardings)
    owners = [plan.arguments[leaves] for leaves in argument_leaves(tree)]
    found = [[t.path.split("/") for t in tensors if t.role != "static"] for tensors in owners]
    first = Counter(paths[0][0] for paths in found if paths)
    named = [paths[0][: 1 + (first[paths[0][0]] > 1)] if paths else ["static"] for paths in found]
    return tuple(map("/".join, named)), donated_arguments(plan, tree)


def _common_home(paths: Sequence[str]) -> str:
    """The longest path that all others begin with, parts of paths as wholes."""
    columns = zip(*(path.split("/")[:-1] for path in paths), strict=False)
    return "/".join(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))


def _gradient(parameter: Tensor, home: str, arguments: Iterable[Tensor]) -> Spec:
    """How a parameter's gradient is split: as its optimizer state, where all of that is split alike."""
    tail = parameter.path[len(home) :]
    state = [t for t in arguments if t.role == "optimizer" and t.shape == parameter.shape and t.path.endswith(tail)]
    splits = {t.spec for t in state}
    return splits.pop() if len(splits) == 1 else parameter.spec


def _short(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Specs by path, where paths that differ in numbers alone and are split alike are one entry with ``*``."""
    alike: dict[str, dict[str, Spec]] = defaultdict(dict)
    for path, spec in specs.items():
        alike[_NUMBER.sub("*", path)][path] = spec
    short: dict[str, Spec] = {}
    for pattern, members in alike.items():
        is_one = len(members) > 1 and len(set(members.values())) == 1
        short |= {pattern: next(iter(members.values()))} if is_one else members
    return short


def _activations(plan: "PlanData") -> dict[Activation, Spec]:
    """Splits of what products and look-ups of the forward pass make; the one of most of them, if they differ."""
    program = _program(plan)
    if program is None:
        return {}
    splits = defaultdict[Activation, Counter[Spec]](Counter)
    for op in plan.ops:
        matters = (op.load is not None and op.load.flops) or op.label.endswith("/gather")
        if op.phase == "forward" and matters and op.results and op.results[0]:
            shape = program.shape(program.made_by(op.serial)[0])
            splits[_scope(plan, op), shape[1:]][op.results[0]] += 1
    return {activation: counts.most_common(1)[0][0] for activation, counts in splits.items()}


def _program(plan: "PlanData") -> "RecordedProgram | None":
    """The traced program; None where a plan file of an earlier version does not have it."""
    return plan.record.program if isinstance(plan.record, Record) else None


def _scope(plan: "PlanData", op: "OpPlan") -> str:
    """An operation's scopes and primitive as the user's code has them, without the loop over microbatches."""
    label = label_words(op.label)
    return _NUMBER.sub("*", label.removeprefix("microbatches/") if plan.microbatches > 1 else label)


def _recomputation(plan: "PlanData") -> tuple[str, tuple[str, ...]]:
    """The policy of `jax.checkpoint` that keeps what the plan keeps, and the scopes whose products it does not keep."""
    again = [op for op in plan.ops if op.load is not None and op.load.recomputed]
    products = [op for op in again if op.load is not None and op.load.flops]
    scopes = dict.fromkeys(_scope(plan, op) for op in products)
    if not again:
        return "everything_saveable", ()
    if not products:
        return "dots_saveable", ()
    program = _program(plan)
    batched = program is not None and all(_is_batched(op, program) for op in products)
    return "dots_with_no_batch_dims_saveable" if batched else "nothing_saveable", tuple(scopes)


def _is_batched(op: "OpPlan", program: "RecordedProgram") -> bool:
    """Whether a product has a loop that indexes both operands and the result, as attention's heads do."""
    nest = program.nests[program.nest[op.serial]]
    every = [{loop for dim in dims for loop in dim} for dims in (*nest.operands[:2], *nest.results[:1])]
    return len(every) == 3 and bool(set.intersection(*every))


def _table(specs: Mapping[str, Spec] | Mapping[Activation, Spec]) -> str:
    """A dict of `PartitionSpec`s as Python writes it."""
    rows = [f"    {path!r}: {_spec(spec)},\n" for path, spec in specs.items()]
    return "{\n" + "".join(rows) + "}" if rows else "{}"


def _spec(spec: Spec) -> str:
    dims = [repr(axes[0] if len(axes) == 1 else axes) if axes else "None" for axes in spec]
    while dims and dims[-1] == "None":
        dims.pop()
    return f"P({', '.join(dims)})"
