"""Plans that were made before, kept in a directory: a run that is started again takes the plan for its devices.

A plan belongs to one program, one method, one description of the devices and one version of Meshwright and JAX; a hash
of all of these is the name of its file. So a plan of anything else is never found, rather than found and refused.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import meshwright
from meshwright.errors import OutputError, PlanFileError
from meshwright.graph import Graph, Traced
from meshwright.plan_files.storage import VERSION, load_plan, save_plan
from meshwright.plans.plan import PlanData

_ADDRESS = re.compile(r" at 0x[0-9a-f]+|id=\d+")
log = logging.getLogger("meshwright")


class PlanKey(NamedTuple):
    """The name of a plan: digests of its program and method, and of the devices that it is for."""

    program: str
    devices: str


def known_or_made(
    directory: str | PathLike[str], key: PlanKey, traced: Traced, make: Callable[[PlanData | None], PlanData]
) -> PlanData:
    """The plan of a key; it is made, and kept, where there is none yet.

    What makes it is given the newest plan of the same program for other devices, where there is one. A file that cannot
    be read, or a disk that cannot be written to, costs a warning: the plan is then made anew.
    """
    path = Path(directory).expanduser() / f"{key.program}-{key.devices}.json"
    if path.exists():
        saved_plan = _read(path, traced)
        if saved_plan is not None:
            log.info("taking the plan that was made before for the same program and devices, from %s", path)
            return saved_plan
    others = {other: other.stat().st_mtime_ns for other in path.parent.glob(f"{key.program}-*.json") if other != path}
    plan = make(_read(max(others, key=others.__getitem__), traced) if others else None)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_plan(plan, path)
    except (OSError, OutputError) as error:
        log.warning("the plan could not be kept for a restart: %s", error)
    return plan


def _read(path: Path, traced: Traced) -> PlanData | None:
    try:
        plan = load_plan(path)
        _ = plan.ops, plan.form  # a run needs them, and a file's lists are read on first use: damage is to be found now
        return of_call(plan, traced)
    except PlanFileError as error:
        log.warning("the plan in %s is made anew: %s", path, error)
        return None


def of_call(plan: PlanData, traced: Traced) -> PlanData:
    """A plan that was read, for a function: what its file does not have is the function's."""
    call = traced.call
    trees = {"in_tree": call.arguments.tree, "out_tree": call.results.tree, "in_leaves": call.arguments.leaves}
    return replace(plan, origin=traced, **trees)


def plan_key(traced: Traced, method: Any, devices: Any, measured: Any) -> PlanKey | None:
    """The name of a plan, of all that it depends on; None where the method has code of the user's.

    Args:
        traced: The program.
        method: How it is planned.
        devices: The cluster or the meshes.
        measured: What was measured of them.
    """
    import jax

    about = "\n".join(_plain((meshwright.__version__, jax.__version__, VERSION, method)))
    where = "\n".join(_plain((devices, measured)))
    if _ADDRESS.search(about) or _ADDRESS.search(where):
        return None
    digest = hashlib.sha256(about.encode())
    for text in _program(traced):
        digest.update(text)
    return PlanKey(digest.hexdigest()[:32], hashlib.sha256(where.encode()).hexdigest()[:16])


def _program(traced: Traced) -> Iterator[bytes]:
    """All that a plan can depend on in a program."""
    graph: Graph = traced.graph
    columns = graph.columns
    for array in (columns.signature, columns.reads, columns.start, columns.first_made, columns.scope, columns.trips):
        yield array.tobytes()
    yield graph.kind.tobytes()
    used = [columns.signatures[number] for number in columns.examples]
    ends = (graph.inputs, graph.outputs, sorted(graph.state.items()), sorted(graph.donated), graph.ties, graph.loops)
    names = (graph.input_paths, graph.output_paths, columns.scopes, traced.call.arguments.positions)
    for value in (used, graph.kinds, ends, names):
        yield _ADDRESS.sub("", "\n".join(_plain(value))).encode()


def _plain(value: Any) -> Iterator[str]:
    """The parts of plain data as text; of a dataclass the fields by which it is equal to others."""
    if is_dataclass(value) and not isinstance(value, type):
        yield type(value).__name__
        for field in fields(value):
            if field.compare:
                yield from _plain(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield repr(key)
            yield from _plain(value[key])
    elif isinstance(value, tuple | list):
        yield f"({len(value)}"
        for each in value:
            yield from _plain(each)
    else:
        yield repr(value)
