"""Reads the collectives and flops of a compiled program from XLA's text, so that a plan can be compared with them.

XLA's GPU backend writes a program in the order in which it is scheduled, and a collective as a start and a done. What
the devices compute in between hides it; a start that its done follows at once hides nothing, and XLA says so
(``is_sync``).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import MeshwrightError
from meshwright.rules.families.attention import unmasked_scores

if TYPE_CHECKING:
    import jax

_START = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = .*? [\w\-]+-start\(")
_DONE = re.compile(r" [\w\-]+-done\((?:.*?%)?([\w.\-]+)[,)]")
_WRAPPED = re.compile(r"calls=%?([\w.\-]+)")
_SYNC = re.compile(r'"?is_sync"?\s*[:=]\s*"?true')
#: Instructions that occupy a device: kernels and what runs many of them.
_WORK = re.compile(r" (?:fusion|custom-call|dot|convolution|while|call|conditional|sort|scatter|reduce)\(")


def work_beside(bodies: Iterable[Sequence[str]]) -> dict[str, int]:
    """How many instructions of work stand between the start and the end of each asynchronous collective.

    Args:
        bodies: The lines of each computation, in the order in which they are scheduled.

    Returns:
        A number for each start, by its name, and by that of the computation that it wraps; 0 where XLA carries the
        collective out at once.
    """
    return {name: count for body in bodies for start, count in _between(body) for name in _names(start)}


def _names(start: str) -> list[str]:
    """The names that a start goes by: its own, and that of a computation of its own."""
    own = _START.match(start)
    return [*([own[1]] if own else []), *_WRAPPED.findall(start)]


def _between(body: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The line of each start, and how much work is done until its end."""
    works = 0
    started: dict[str, tuple[str, int]] = {}
    for line in body:
        start, done = _START.match(line), _DONE.search(line)
        if start is not None:
            started[start[1]] = line, works
        elif done is not None and done[1] in started:
            begun, before = started.pop(done[1])
            yield begun, 0 if _SYNC.search(begun) else works - before
        elif _WORK.search(line):
            works += 1


_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(_KINDS)})(-start)?\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|(?:true|false)_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_DEFINED = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (\([^()]*\)|\S+) ")
_PRODUCT = re.compile(r"= (.*?) (dot|convolution|custom-call)\(([^)]*)\)")
_CONTRACTED = re.compile(r'(?:lhs_contracting_dims=\{|"lhs_contracting_dimensions":\[)([^}\]]*)')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_BACKWARD = re.compile(r"__cudnn\$convBackward(Filter|Input)")
_ATTENTION = re.compile(r'__cudnn\$fmha\w*?(Backward)?".*?"intermediate_tensor_shape":\{"dimensions":\[([^\]]*)\]')
_WINDOW = re.compile(r'"sliding_window_length":(\d+)')
_DILATED = re.compile(r"lhs_dilate=([0-9x]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_STATED = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_ARRAY = re.compile(r"([a-z]+\w*)\[([0-9,]*)\]")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[0-9,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\[.*?\](?:T\(.*?\))?|[0-9,]*)\))? \{([^}]*)\}")


@dataclass(frozen=True, slots=True)
class CompiledCollective:
    """One collective of a compiled program.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or permute.
        axes: Names of the mesh axes along which its groups extend.
        bytes: Bytes of one trip, by the convention of `Mesh.collective_s`.
        trips: How often it runs; a loop whose length XLA does not state counts as one trip.
        name: Its name in the text.
        operation: Scopes and primitive of the operation that it belongs to, as XLA names them.
        source: The user's source line, ``file:line``; empty where XLA does not know.
        beside: How many instructions of work run between its start and its end; 0 where it is not asynchronous.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    trips: int = 1
    name: str = field(default="", compare=False)
    operation: str = field(default="", compare=False)
    source: str = field(default="", compare=False)
    beside: int = field(default=0, compare=False)


def text_of(compiled: "jax.stages.Compiled") -> str:
    """The text of a compiled program.

    Raises:
        MeshwrightError: The backend does not show it.
    """
    text = compiled.as_text()
    if text is None:
        raise MeshwrightError("this backend does not show what it compiled; compare the plan on a CPU or a GPU")
    return text


def collectives_of(text: str, mesh: Mapping[str, int]) -> list[CompiledCollective]:
    """All collectives of a program, in the order of its text; collectives of a single device are left out.

    Args:
        text: The result of `jax.stages.Compiled.as_text`.
        mesh: Axis names and sizes of the mesh that the program was compiled for: ``plan.mesh.shape``.
    """
    bodies, entry = _computations(text)
    trips = _trips(bodies, entry)
    beside, frames = work_beside(bodies.values()), frames_of(text)
    found = [
        replace(item, source=frames.get(item.source, item.source), beside=beside.get(item.name, beside.get(name, 0)))
        for name, body in bodies.items()
        if trips[name]
        for line in body
        if (item := _read(line, mesh, trips[name])) is not None
    ]
    return [item for item in found if item.axes]


def frames_of(text: str) -> dict[str, str]:
    """The source line of each stack frame in a program's text, by the frame's number."""
    tables = {}
    for name in ("FileNames", "FileLocations", "StackFrames"):
        _, _, rest = text.partition(f"\n{name}\n")
        tables[name] = rest.partition("\n\n")[0]
    files = dict(re.findall(r'(\d+) "(.*)"', tables["FileNames"]))
    places = re.findall(r"(\d+) \{file_name_id=(\d+) .*?line=(\d+)", tables["FileLocations"])
    lines = {number: f"{files.get(file, '')}:{line}" for number, file, line in places}
    frames = re.findall(r"(\d+) \{file_location_id=(\d+)", tables["StackFrames"])
    return {number: lines.get(place, "") for number, place in frames}


def flops_of(text: str) -> float:
    """Floating-point operations of a program's products, convolutions and calls of cuDNN's attention, on one device.

    As in a plan, the zeros that the gradient of a strided convolution inserts between pixels are not counted.
    """
    bodies, entry = _computations(text)
    trips = _trips(bodies, entry)
    return float(sum(trips[name] * sum(_flops(body)) for name, body in bodies.items() if trips[name]))


def _flops(body: list[str]) -> Iterator[float]:
    """The flops of each product in a computation."""
    shapes = dict(_shapes(body))
    for line in body:
        match = _PRODUCT.search(line)
        if match is None:
            continue
        labels, contracted = _LABELS.search(line), _CONTRACTED.search(line)
        if not labels and not contracted:  # another library's call, such as a Cholesky factorisation
            continue
        result = _ints(_ARRAY.findall(match[1])[0][1])
        if attention := _ATTENTION.search(line):
            yield _of_attention(line, result[-1], attention)
            continue
        left, right = (shapes.get(name, []) for name in re.findall(r"%([\w.\-#]+)", match[3])[:2])
        if labels:
            pixels, filters = _of_convolution(line, left, right, result)
            outputs = filters[labels[1].index("o")] if len(filters) == len(labels[1]) else 1
            holes = _DILATED.search(line)
            skipped = prod(map(int, holes[1].split("x"))) if holes else 1
            yield 2.0 * prod(pixels) * prod(filters) / max(outputs, 1) / skipped
        elif contracted:
            dims = [int(d) for d in re.findall(r"\d+", contracted[1])]
            yield 2.0 * prod(result) * prod(left[d] for d in dims)


def _of_attention(line: str, width: int, call: re.Match[str]) -> float:
    """The flops of cuDNN's attention: two products of all scores that no mask excludes, five in the backward pass."""
    *batch, queries, keys = (int(d) for d in re.findall(r"\d+", call[2]))
    window = _WINDOW.search(line)
    scores = unmasked_scores(queries, keys, '"mask_type":"CAUSAL"' in line, int(window[1]) if window else 0)
    return 2.0 * prod(batch) * scores * width * (5 if call[1] else 2)


def _of_convolution(line: str, left: list[int], right: list[int], result: list[int]) -> tuple[list[int], list[int]]:
    """Result and filter of a convolution; for cuDNN's gradient calls, those of the forward convolution."""
    gradient = _BACKWARD.search(line)
    if gradient is None:
        return result, right
    return (right, result) if gradient[1] == "Filter" else (left, right)


def _shapes(body: list[str]) -> Iterator[tuple[str, list[int]]]:
    """The shape of every array that a computation names; of a tuple, also of its parts, as ``name#number``."""
    for match in filter(None, map(_DEFINED.match, body)):
        arrays = [_ints(dims) for _, dims in _ARRAY.findall(match[2])]
        yield from ((match[1], dims) for dims in arrays[:1])
        yield from ((f"{match[1]}#{number}", dims) for number, dims in enumerate(arrays))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, by name, and the name of the first to run."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            name = header[2]
            entry = name if header[1] else entry
        bodies.setdefault(name, []).append(line)
    return bodies, entry


def _trips(bodies: dict[str, list[str]], entry: str) -> Mapping[str, int]:
    """How often each computation runs; in XLA's text callers stand below the computations they call."""
    trips: defaultdict[str, int] = defaultdict(int, {entry: 1})
    for caller in reversed(bodies):
        for line in bodies[caller] if trips[caller] else ():
            called = _CALLED.findall(line)
            called += [b.strip(" %") for branches in _BRANCHES.findall(line) for b in branches.split(",")]
            stated = _TRIPS.search(line)
            for callee in called:
                trips[callee] += trips[caller] * (int(stated[1]) if stated else 1)
    return trips


def _read(line: str, mesh: Mapping[str, int], trips: int) -> CompiledCollective | None:
    match = _COLLECTIVE.search(line)
    if match is None:
        return None
    kind, groups = _KINDS[match[2]], _groups(line, prod(mesh.values()))
    result = re.sub(r"/\*.*?\*/", "", match[1])
    if match[3] and (kind != "all_reduce" or result.startswith("((")):  # a start's result holds its operands first
        result = " ".join(_elements(result)[1:2])
    size = sum(map(_array_bytes, _ARRAY.findall(result)))
    if kind in ("reduce_scatter", "all_to_all"):
        size *= groups.shape[1]
    places = np.stack(np.unravel_index(groups, tuple(mesh.values())), axis=-1)  # [group, member, axis]
    spread = (places != places[:, :1]).any(axis=(0, 1))
    axes = tuple(np.array(list(mesh))[spread].tolist())
    return CompiledCollective(
        kind, axes, size, trips, line.partition("=")[0].strip().removeprefix("ROOT").strip(" %"), *origin_of(line)
    )


def origin_of(line: str) -> tuple[str, str]:
    """The operation that an instruction belongs to, and its source: ``file:line``, or the number of a stack frame."""
    operation, frame, stated = _OP_NAME.search(line), _FRAME.search(line), _STATED.search(line)
    source = f"{stated[1]}:{stated[2]}" if stated else frame[1] if frame else ""
    return operation[1] if operation else "", source


def _elements(text: str) -> list[str]:
    """The elements of a tuple's type: commas inside brackets do not separate them."""
    depth, parts = 0, [""]
    for character in text[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _array_bytes(array: tuple[str, str]) -> int:
    dtype, dims = array
    bits = re.search(r"\d+", dtype)
    return prod(_ints(dims)) * (8 if dtype == "pred" else int(bits[0]) if bits else 0) // 8


def _groups(line: str, num_devices: int) -> NDArray[np.int64]:
    """The devices that communicate, ``[group, member]``; of a permute each pair is a group."""
    if listed := _LISTED.search(line):
        rows = [_ints(row) for row in re.findall(r"\{([0-9,]*)\}", listed[1])]
        return np.array(rows or [list(range(num_devices))])
    if meshed := _MESH.search(line):
        return _mesh_groups(*meshed.groups())
    iota = _IOTA.search(line)
    return _iota(iota[2], iota[3]).reshape(_ints(iota[1])) if iota else np.arange(num_devices)[None]


def _mesh_groups(axes: str, ids: str | None, used: str) -> NDArray[np.int64]:
    """``mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}``; ``'b':(2)2`` is b's factor 2 after its first 2."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    within = {
        name: (int(before), int(size)) if size else (1, sizes[name])
        for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", used)
    }
    splits = [(name, *within.get(name, (size, 1)), size) for name, size in sizes.items()]
    shape = [part for _, before, size, whole in splits for part in (before, size, whole // before // size)]
    order = sorted(range(len(shape)), key=lambda i: i % 3 == 1)  # the middle parts are the groups' members
    members = prod(size for _, _, size, _ in splits)
    return _device_ids(ids, prod(shape)).reshape(shape).transpose(order).reshape(-1, members)


def _device_ids(text: str | None, count: int) -> NDArray[np.int64]:
    counted = re.match(r"\[([0-9,]+)\](?:T\(([0-9,]+)\))?", text or f"[{count}]")
    return _iota(counted[1], counted[2]) if counted else np.array(_ints(text or ""))


def _iota(shape: str, order: str | None) -> NDArray[np.int64]:
    counted = np.arange(prod(_ints(shape))).reshape(_ints(shape))
    return counted.transpose(_ints(order)) if order else counted


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
