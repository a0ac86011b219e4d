"""The direction of imports: every module stands on a floor, and imports only from floors below and from its own."""

import ast
from functools import cache
from pathlib import Path

import pytest

import meshwright

ROOT = Path(meshwright.__file__).parent
#: From the ground up; what stands on one line may be imported by every line below it.
FLOORS = (
    "errors names units arrays lazy",
    "schema output scratch console fallback jit progress",
    "jax_compat jax_devices",
    "hardware",
    "rules",
    "strategy",
    "program",
    "graph",
    "cost",
    "blocks",
    "solver",
    "contest",
    "profiler",
    "schedules",
    "plans",
    "parallelism",
    "plan_files",
    "runtime",
    "planner",
    "pipeline",
    "explain",
    "simulator",
    "rehearsal",
    "export",
    "report",
    "step_search",
    "facade",
    "planning",
    "training",
    "passes",
    "ray",
    "exploration",
    "zoo",
    "hf",
    "serving",
    "trainer",
    "validation",
    "warm",
    "cli __main__",
)
#: The same within folders: their sub-folders and files, from the ground up. A folder is pinned once it has a line here.
INNER_FLOORS = {
    "contest": (
        "tuning",
        "decimation tree_moves windows",
        "moves",
        "anytime",
        "worker",
        "giant warm",
        "driver",
    ),
    "rehearsal": (
        "share",
        "parts",
        "combinations measuring memory whole_steps",
        "learning",
        "stages",
        "rehearsal search",
    ),
    "rules": (
        "base",
        "builder written",
        "registry",
        "families",
    ),
    "solver": (
        "tuning deadline problem",
        "model",
        "reductions",
        "bounds",
        "exact",
        "run",
        "driver",
        "warm",
    ),
}
MODULES = {
    ".".join(("meshwright", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


@cache
def imported(name):
    """The modules of the package that one module imports, inside functions and for type checking, too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "meshwright":
            assert node.level == 0
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= inner or {node.module}
    return found - {name}


def floor(name):
    top = name.split(".")[1]
    return next(number for number, members in enumerate(FLOORS) if top in members.split())


def test_every_module_stands_on_a_floor():
    known = {member for members in FLOORS for member in members.split()}
    assert {name.split(".")[1] for name in MODULES if "." in name} == known


def test_imports_point_down():
    upwards = [
        (name, other)
        for name in MODULES
        if "." in name
        for other in imported(name) - {"meshwright"}
        if floor(other) > floor(name)
    ]
    assert upwards == []


@pytest.mark.parametrize("folder", INNER_FLOORS)
def test_imports_within_a_folder_point_down(folder):
    inner_floor = {member: at for at, members in enumerate(INNER_FLOORS[folder]) for member in members.split()}
    below = f"meshwright.{folder}."
    inside = {name: name.split(".")[2] for name in MODULES if name.startswith(below)}
    assert set(inside.values()) == inner_floor.keys()
    upwards = [
        (name, other)
        for name, member in inside.items()
        for other in imported(name) & inside.keys()
        if inner_floor[inside[other]] > inner_floor[member]
    ]
    assert upwards == []


def test_no_imports_form_a_circle():
    waiting = {name: imported(name) - {"meshwright"} for name in MODULES}
    while free := [name for name, needed in waiting.items() if not needed & waiting.keys()]:
        for name in free:
            del waiting[name]
    assert sorted(waiting) == []
