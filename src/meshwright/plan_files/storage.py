"""Saves plans as deterministic, versioned JSON and reads them back."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from meshwright.errors import PlanFileError
from meshwright.hardware import Mesh
from meshwright.output import write_whole
from meshwright.plan_files.stored_operations import check_axes, ops_to_json, parse_ops
from meshwright.plans.operations import Collective, OpPlan
from meshwright.plans.plan import Cost, Memory, PlanData, SolutionSummary
from meshwright.plans.pytree_json import checked_structure, skeleton
from meshwright.plans.search_log import Compared, Considered
from meshwright.plans.stage import Microbatches, Pipeline, Stage, Submesh
from meshwright.plans.tensor import Tensor, parse_spec, spec_text
from meshwright.schema import Count, built, checked, parse_json
from meshwright.solver.problem.gap import relative_gap

if TYPE_CHECKING:
    from meshwright.plans.records.judgement import Judgement
    from meshwright.plans.records.record import Record
    from meshwright.plans.records.staged_record import StagedRecord

FORMAT = "meshwright-plan"
VERSION = 7
# Version 1 has neither record nor judgement, version 2 none of stages, and both list operations; version 3 no merged
# reductions; version 4 has neither the choice without a limit nor the parts of stages' times; version 5 marks neither
# prefetched copies nor copies that readers slice out themselves; versions up to 6 have costs of kernels that run alone.
READABLE = (1, 2, 3, 4, 5, 6, VERSION)
_ALONE = 6
_OLD_COSTS = (
    "An earlier Meshwright made this plan, by the rates of kernels that run alone: its costs, and the times of its "
    "stages, are shorter than those of plans that are made now. Make it again to compare them."
)
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError, MemoryError)


@dataclass(frozen=True)
class SavedDetails:
    """The long lists of a loaded plan, as its file has them; each is read on first use.

    Attributes:
        data: The lists.
        axes: Names of the axes that they may refer to.
        num_stages: The number of the plan's stages.
        paths: Paths of the arguments and results that are arrays.
    """

    data: dict[str, Any]
    axes: tuple[str, ...]
    num_stages: int
    paths: tuple[str, ...]

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """See `Details`."""
        with _damage("collectives"):
            collectives = built(tuple[Collective, ...], self.data["collectives"], "collectives")
            for number, item in enumerate(collectives):
                check_axes([item.axes], self.axes, f"collectives[{number}]")
            return collectives

    @cached_property
    def ops(self) -> tuple[OpPlan, ...]:
        """See `Details`."""
        with _damage("ops"):
            return parse_ops(checked(self.data["ops"], list, "ops"), self.axes, "ops")

    def make_record(self, limit: float | None) -> "Record | StagedRecord | None":
        """See `Details`."""
        from meshwright.plan_files.packing import unpack
        from meshwright.plan_files.record_checks import check_record, check_staged
        from meshwright.plans.records.record import Record
        from meshwright.plans.records.staged_record import StagedRecord

        packed = self.data.get("record")
        if packed is None:
            return None
        with _damage("record"):
            arrays = checked(unpack(checked(packed, str, "record")), dict, "record")
            if "views" in arrays:
                return check_staged(StagedRecord.from_data(arrays), self.num_stages)
            record = check_record(Record.from_data(arrays))
            known = {*record.program.inputs, *record.program.outputs}
            if unknown := [path for path in self.paths if path not in known]:
                raise ValueError(f"it knows nothing of {unknown[0]!r:.60}, which the plan places")
            return record

    def make_judgement(self, plan: PlanData) -> "Judgement":
        """See `Details`."""
        from meshwright.plans.records.judgement import Judgement

        saved = self.data.get("judgement")
        if saved is None or (plan.pipeline is not None and self.data.get("record") is None):
            from meshwright.parallelism.without_program import judge_at_rest

            return judge_at_rest(plan)
        with _damage("judgement"):
            judgement = checked(Judgement.from_json(saved, (*plan.arguments, *plan.results)), Judgement, "judgement")
            if len(judgement.stages) != len(plan.stages):
                raise ValueError(f"it judges {len(judgement.stages)} stages, and the plan has {len(plan.stages)}")
            return judgement

    def make_form(self, plan: PlanData) -> str:
        """See `Details`; files of earlier versions do not have it."""
        from meshwright.plan_files.packing import unpack

        if "program" not in self.data:
            return ""
        with _damage("program"):
            table = _table(self.data["program"], "program")
            form = checked(unpack(checked(table["form"], str, "program.form")), str, "program.form")
            if _fingerprint(form) != table["fingerprint"]:
                raise ValueError("its form is not the one of its fingerprint")
            return form


@contextmanager
def _damage(part: str) -> Iterator[None]:
    """Turns errors into a `PlanFileError` that names the part of the file which cannot be read."""
    try:
        yield
    except _DAMAGE as error:
        raise PlanFileError(f"the plan is damaged in its {part!r}: {_reason(error)}; save the plan again") from error


def _reason(error: BaseException) -> str:
    """The error in a few words: for a missing entry, Python's message is only its key."""
    if isinstance(error, KeyError):
        return f"the entry {error} is missing"
    return str(error) if isinstance(error, ValueError) else f"an entry is not what it should be ({error})"


def save_plan(plan: PlanData, path: Path) -> None:
    """Writes a plan atomically: the file is complete or absent."""
    write_whole(path, plan_json(plan))


def comparable(plan: PlanData) -> dict[str, Any]:
    """The data by which plans are equal: all but the name and the solver's progress, which depends on the clock."""
    data = plan_to_json(plan)
    provenance = {key: value for key, value in data["provenance"].items() if key != "model"}
    return data | {"provenance": provenance, "considered": [view | {"rounds": []} for view in data["considered"]]}


def plan_json(plan: PlanData) -> str:
    """The text of a plan's file."""
    return _text(plan_to_json(plan), 2) + "\n"


def _text(data: Any, depth: int) -> str:
    """JSON with a line for each entry down to a depth, so that files are short and can be compared line by line."""
    if not depth or not isinstance(data, dict | list) or not data:
        return json.dumps(data, ensure_ascii=False)
    pad = " " * (3 - depth)
    if isinstance(data, dict):
        rows = [f"{pad}{json.dumps(key, ensure_ascii=False)}: {_text(value, depth - 1)}" for key, value in data.items()]
        return "{\n" + ",\n".join(rows) + "\n" + pad[1:] + "}"
    if all(isinstance(value, int | float | str) for value in data):
        return json.dumps(data, ensure_ascii=False)
    return "[\n" + ",\n".join(f"{pad}{_text(value, 0)}" for value in data) + "\n" + pad[1:] + "]"


def load_plan(path: Path) -> PlanData:
    """Reads a plan.

    Raises:
        PlanFileError: There is no such file, it is damaged, or it is of another version.
    """
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanFileError(f"there is no plan file {path}; save one with plan.save({str(path)!r})") from None
    except OSError as error:
        raise PlanFileError(f"{path} cannot be read: {error.strerror}; give the file that plan.save wrote") from None
    except ValueError as error:
        raise PlanFileError(f"{path} is not a plan: it is not valid JSON ({error}); save the plan again") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanFileError(f'{path} is not a plan: it lacks "format": {FORMAT!r}')
    version, provenance = data.get("version"), data.get("provenance")
    if isinstance(version, bool) or version not in READABLE:
        writer = provenance.get("meshwright", "unknown") if isinstance(provenance, dict) else "unknown"
        raise PlanFileError(
            f"{path} is a plan of version {version!r:.60}, and this Meshwright reads versions 1 to {VERSION}; "
            f"make the plan again, or read it with the Meshwright that wrote it ({writer!s:.60})"
        )
    try:
        return plan_from_json(data)
    except _DAMAGE as error:
        raise PlanFileError(f"{path} is a damaged plan: {_reason(error)}; save the plan again") from error


def plan_to_json(plan: PlanData) -> dict[str, Any]:
    """The plan as plain JSON data."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "method": plan.method,
        "mesh": plan.mesh.to_json(),
        "step_s": plan.step_s,
        "cost": asdict(plan.cost) | {"total": plan.cost.total},
        "flops": plan.flops,
        "memory": asdict(plan.memory),
        "solution": _solution_to_json(plan.solution),
        "unsplittable": list(plan.unsplittable),
        "considered": [_considered_to_json(c) for c in plan.considered],
        "compared": [asdict(one) for one in plan.compared],
        "provenance": dict(plan.provenance),
        "remarks": list(plan.remarks),
        "microbatches": plan.microbatches,
        "batch_argnums": list(plan.batch_argnums),
        "recompute": plan.recompute,
        "arguments": [_tensor_to_json(t) for t in plan.arguments],
        "results": [_tensor_to_json(t) for t in plan.results],
        "judgement": plan.judgement.to_json(),
        **(plan.details.data if isinstance(plan.details, SavedDetails) else _details_to_json(plan)),
        "in_structure": plan.in_structure if plan.in_tree is None else skeleton(plan.in_tree),
        "out_structure": plan.out_structure if plan.out_tree is None else skeleton(plan.out_tree),
    }
    if plan.pipeline is not None:
        data |= {"pipeline": asdict(plan.pipeline), "stages": [stage_to_json(stage) for stage in plan.stages]}
    return data


def _details_to_json(plan: PlanData) -> dict[str, Any]:
    from meshwright.plan_files.packing import pack

    return {
        "collectives": [asdict(c) | {"axes": list(c.axes)} for c in plan.collectives],
        "ops": ops_to_json(plan.ops),
        "record": None if plan.record is None else pack(plan.record.to_data()),
        "program": {"fingerprint": _fingerprint(plan.form), "form": pack(plan.form)},
    }


def _fingerprint(form: str) -> str:
    return hashlib.sha256(form.encode()).hexdigest()[:32]


def _details_from_json(data: dict[str, Any], axes: tuple[str, ...], tensors: Iterable[Tensor]) -> SavedDetails:
    names = ["collectives", "ops"] if data["version"] == 1 else ["judgement", "collectives", "ops", "record"]
    names += [name for name in ("program",) if name in data]  # files of earlier versions do not have it
    paths = tuple(tensor.path for tensor in tensors if tensor.role != "static")
    return SavedDetails({name: data[name] for name in names}, axes, len(data.get("stages", ())), paths)


def plan_from_json(data: dict[str, Any]) -> PlanData:
    """The plan of plain JSON data.

    Raises:
        ValueError, KeyError, TypeError: The data are not those of a plan; a `ValueError` says where and how.
    """
    mesh = Mesh.from_json(data["mesh"])
    arguments, results = (_tensors(data[name], name) for name in ("arguments", "results"))
    remarks = built(tuple[str, ...], data.get("remarks", ()), "remarks")
    if data["version"] <= _ALONE and not mesh.is_abstract:
        remarks = (*remarks, _OLD_COSTS)
    plan = PlanData(
        mesh=mesh,
        method=data["method"],
        cost=built(Cost, {k: v for k, v in _table(data["cost"], "cost").items() if k != "total"}, "cost"),
        flops=data["flops"],
        memory=built(Memory, data["memory"], "memory"),
        solution=built(SolutionSummary, _table(data["solution"], "solution") | {"gap": 0.0}, "solution"),
        arguments=arguments,
        results=results,
        details=_details_from_json(data, mesh.names, (*arguments, *results)),
        unsplittable=built(tuple[str, ...], data["unsplittable"], "unsplittable"),
        considered=built(tuple[Considered, ...], data["considered"], "considered"),
        compared=built(tuple[Compared, ...], data.get("compared", ()), "compared"),
        provenance=data["provenance"],
        remarks=remarks,
        microbatches=built(Microbatches, data.get("microbatches", 1), "microbatches"),
        batch_argnums=built(tuple[Count, ...], data.get("batch_argnums", ()), "batch_argnums"),
        recompute=built(str, data.get("recompute", "as written"), "recompute"),
        in_structure=checked_structure(data["in_structure"], len(arguments), "in_structure"),
        out_structure=checked_structure(data["out_structure"], len(results), "out_structure"),
        pipeline=built(Pipeline, data["pipeline"], "pipeline") if "pipeline" in data else None,
        stages=tuple(
            stage_from_json(stage, mesh, f"stages[{number}]")
            for number, stage in enumerate(checked(data.get("stages", []), list, "stages"))
        ),
    )
    _check(plan)
    # The gap follows from cost and bound: it may be infinite, and older files held it relative to the cost.
    gap = relative_gap(plan.cost.total, plan.solution.lower_bound)
    return replace(plan, solution=replace(plan.solution, gap=gap))


def _check(plan: PlanData) -> None:
    """Refuses a plan whose parts have wrong types or are inconsistent."""
    for name, kind in _types().items():
        checked(getattr(plan, name), kind, name)
    if bool(plan.stages) != (plan.pipeline is not None):
        raise ValueError("a plan has stages where it has a pipeline, and this one has only one of the two")
    lengths = {len(stage.chunks or (stage.layers,)) for stage in plan.stages}
    if plan.pipeline is not None and lengths != {plan.pipeline.interleave}:
        raise ValueError(f"stages have {sorted(lengths)} chunks, and the pipeline says {plan.pipeline.interleave}")
    meshes = [stage.mesh for stage in plan.stages] or [plan.mesh]
    names = max((mesh.names for mesh in meshes), key=len)
    placed = [(plan.arguments, names), (plan.results, names), *((s.tensors, s.mesh.names) for s in plan.stages)]
    for tensors, axes in placed:
        for tensor in tensors:
            check_axes(tensor.spec, axes, tensor.path)
            if tensor.role != "static" and len(tensor.spec) != len(tensor.shape):
                raise ValueError(f"{tensor.path} has {len(tensor.shape)} dims, and a sharding of {len(tensor.spec)}")
    paths = {tensor.path for tensor in plan.arguments}
    for number, stage in enumerate(plan.stages):
        for tensor in stage.tensors:
            if tensor.path not in paths:
                raise ValueError(f"stages[{number}] holds {tensor.path!r:.60}, which is no argument of the plan")


@cache
def _types() -> dict[str, Any]:
    """The types that `PlanData` declares; a mesh and what is read on first use check themselves."""
    return {name: kind for name, kind in get_type_hints(PlanData).items() if name not in ("mesh", "details")}


def _solution_to_json(solution: SolutionSummary) -> dict[str, Any]:
    data = {k: v for k, v in asdict(solution).items() if k != "seconds"}
    return data | {"gap": solution.gap if isfinite(solution.gap) else None}


def _considered_to_json(view: Considered) -> dict[str, Any]:
    rounds = [[r.num_held, r.status, [[p.cost, p.lower_bound] for p in r.progress]] for r in view.rounds]
    return asdict(replace(view, rounds=())) | {"rounds": rounds}


def stage_to_json(stage: Stage) -> dict[str, Any]:
    """A stage as plain JSON data; its machines are part of the plan's."""
    changed = {"mesh": list(stage.mesh.sizes), "tensors": [_tensor_to_json(t) for t in stage.tensors]}
    return asdict(replace(stage, mesh=None, tensors=())) | changed  # type: ignore[arg-type]


def stage_from_json(data: Any, whole: Mesh, where: str) -> Stage:
    """The stage of plain JSON data, given the plan's mesh."""
    table = _table(data, where)
    submesh = built(Submesh, table["submesh"], f"{where}.submesh")
    if whole.cluster is None:
        raise ValueError("stages need a cluster, and the plan's mesh is abstract")
    parts = {key: value for key, value in table.items() if isinstance(value, dict) and key != "submesh"}
    changed = {
        "submesh": submesh,
        "mesh": submesh.machines(whole.cluster).mesh(built(tuple[Count, ...], table["mesh"], f"{where}.mesh")),
        "tensors": _tensors(table["tensors"], f"{where}.tensors"),
        **{key: {"product_s": part.get("compute_s")} | part for key, part in parts.items()},
    }
    return built(Stage, table | changed, where)


def _tensor_to_json(tensor: Tensor) -> dict[str, Any]:
    return asdict(tensor) | {"spec": spec_text(tensor.spec)}


def _tensors(data: Any, where: str) -> tuple[Tensor, ...]:
    tensors = []
    for number, item in enumerate(checked(data, list, where)):
        table = _table(item, f"{where}[{number}]")
        spec = parse_spec(checked(table["spec"], str, f"{where}[{number}].spec"))
        tensors.append(built(Tensor, table | {"spec": spec}, f"{where}[{number}]"))
    return tuple(tensors)


def _table(data: Any, where: str) -> dict[str, Any]:
    return checked(data, dict[str, Any], where)
