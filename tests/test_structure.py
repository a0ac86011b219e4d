"""What a reader may count on in the source: types that say something, and names that are one thing's."""

import ast
from collections import Counter, defaultdict
from pathlib import Path

import meshwright

ROOT = Path(meshwright.__file__).parent
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}
#: Functions that may return `Any`: what users' functions return, trees of arrays, JSON, `__getattr__`.
MOST_ANY = 80
#: The models of the zoo are siblings: each file has the same names.
OF_SIBLINGS = {"Config"}


def test_few_functions_return_any() -> None:
    untyped = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.returns is not None and ast.unparse(node.returns) == "Any"
    ]
    by_folder = Counter(line.partition("/")[0] for line in untyped)
    assert len(untyped) <= MOST_ANY, f"{len(untyped)} functions return Any, by folder {by_folder}"


def test_any_has_no_other_name_but_those_of_the_zoo() -> None:
    aliases = {
        node.targets[0].id
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if isinstance(node.value, ast.Name) and node.value.id == "Any"
    }
    assert aliases == {"PyTree", "Source"}


def test_no_class_name_is_used_three_times() -> None:
    places = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    often = {name: paths for name, paths in places.items() if len(paths) > 2 and name not in OF_SIBLINGS}
    assert often == {}
