"""Reads and writes the contest's JSON, plain or gzipped."""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import ProblemError
from meshwright.solver.problem import validate
from meshwright.solver.problem.validate import IMPOSSIBLE, Stored

_WRITTEN_IMPOSSIBLE = 10**18


def load(path: str | Path) -> Stored:
    """Reads a problem, plain or gzipped; a fault is a one-line `ProblemError` that names the file and the element."""
    path = Path(path)
    try:
        return from_text(_read(path), path.name.split(".")[0])
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from None


def from_text(text: bytes, name: str = "") -> Stored:
    """Parses the contest's JSON."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProblemError(f"not JSON ({error})") from None
    return _checked(_fields(document), name)


def save(problem: Stored, path: str | Path) -> None:
    """Writes a problem; see `ChoiceProblem.save`."""
    path = Path(path)
    text = json.dumps({"problem": _contest_form(problem)}, separators=(",", ":")).encode()
    # A fixed time stamp keeps equal problems equal on disk.
    path.write_bytes(gzip.compress(text, 6, mtime=0) if path.suffix == ".gz" else text)


def _read(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise ProblemError(f"damaged gzip data ({error})") from None
        raise ProblemError(f"cannot be read ({error.strerror})") from None
    except EOFError:
        raise ProblemError("truncated gzip data: the file ends early") from None
    except zlib.error as error:
        raise ProblemError(f"damaged gzip data ({error})") from None


def _fields(document: Any) -> dict[str, Any]:
    """The five lists and the limit."""
    problem = _field(document, "problem", dict)
    nodes, edges = _field(problem, "nodes", dict, "problem."), _field(problem, "edges", dict, "problem.")
    return {
        "costs": _field(nodes, "costs", list, "problem.nodes."),
        "usages": _field(nodes, "usages", list, "problem.nodes."),
        "intervals": _field(nodes, "intervals", list, "problem.nodes."),
        "edge_nodes": _field(edges, "nodes", list, "problem.edges."),
        "edge_costs": _field(edges, "costs", list, "problem.edges."),
        "limit": problem.get("usage_limit"),
    }


def _field(parent: Any, name: str, kind: type, prefix: str = "") -> Any:
    if not isinstance(parent, dict) or name not in parent:
        raise ProblemError(f"the field {prefix}{name} is missing")
    if not isinstance(parent[name], kind):
        raise ProblemError(f"the field {prefix}{name} is {type(parent[name]).__name__}: it must be a {kind.__name__}")
    return parent[name]


def _checked(parts: dict[str, Any], name: str) -> Stored:
    first, cost = validate.costs(parts["costs"])
    rows = validate.contest_rows(first, parts["usages"], parts["intervals"])
    pairs, matrices = parts["edge_nodes"], parts["edge_costs"]
    num_pairs, num_matrices = len(pairs), len(matrices)
    if num_pairs != num_matrices:
        raise ProblemError(f"problem.edges has {num_pairs} pairs of nodes and {num_matrices} lists of costs")
    ends = validate.edge_ends(pairs, len(first) - 1)
    matrix_first, flat = validate.flatten("costs of edge", matrices)
    pooled = validate.Edges(ends, np.arange(len(ends), dtype=np.int32), matrix_first, flat)
    validate.check_edges(first, pooled, "costs of edge")
    return Stored(first, cost, pooled, rows, validate.limit(parts["limit"]), name)


def _contest_form(problem: Stored) -> dict[str, Any]:
    """One interval per node: further rows become nodes of their own, tied to theirs."""
    sizes = np.diff(problem.first)
    costs = [_numbers(problem.cost[a:b]) for a, b in zip(problem.first[:-1], problem.first[1:], strict=True)]
    intervals = [[0, 0] for _ in costs]
    usages: list[list[float]] = [[0] * int(k) for k in sizes]
    edges, rows = problem.edges, problem.rows
    pairs = edges.nodes.tolist()
    spans = zip(edges.matrix_first[edges.matrix_index], edges.matrix_first[edges.matrix_index + 1], strict=True)
    matrices = [_numbers(edges.matrix[begin:end]) for begin, end in spans]
    taken = set()
    for r in range(len(rows.node)):
        node = int(rows.node[r])
        k = int(sizes[node])
        used = _numbers(rows.usage[rows.first[r] : rows.first[r] + k])
        span = [int(rows.start[r]), int(rows.end[r])]
        if node not in taken:
            taken.add(node)
            intervals[node], usages[node] = span, used
            continue
        intervals.append(span)
        usages.append(used)
        costs.append([0] * k)
        pairs.append([node, len(costs) - 1])
        ties = (0 if i == j else _WRITTEN_IMPOSSIBLE for i in range(k) for j in range(k))
        matrices.append(list(ties))
    form: dict[str, Any] = {"name": problem.name} if problem.name else {}
    form["nodes"] = {"intervals": intervals, "costs": costs, "usages": usages}
    form["edges"] = {"nodes": pairs, "costs": matrices}
    form["usage_limit"] = None if np.isinf(problem.limit) else _numbers(np.array([problem.limit]))[0]
    return form


def _numbers(values: np.ndarray) -> list[float]:
    """Whole numbers as integers, impossible ones as the contest writes them."""
    capped = np.where(values >= IMPOSSIBLE, float(_WRITTEN_IMPOSSIBLE), values)
    if bool((capped == np.floor(capped)).all()):
        return list(map(int, capped.tolist()))
    return capped.tolist()
