"""Which parameter a leaf of the optimizer's state belongs to."""

from collections.abc import Iterable

from meshwright.parallelism.dim_names import DimClasses
from meshwright.plans.records.traced_program import RecordedProgram


def find_owners(
    program: RecordedProgram, classes: DimClasses, parameters: Iterable[int], optimizer: Iterable[int]
) -> dict[int, int]:
    """For each leaf of the optimizer the parameter of the same dims and of the most similar path; itself for none."""

    def dims(value: int) -> tuple[tuple[int, int], ...]:
        """Classes and sizes; a dim of one is like any other of one."""
        pairs = zip(classes.of(value), program.shape(value), strict=True)
        return tuple((dim_class if size > 1 else -1, size) for dim_class, size in pairs)

    paths = program.inputs
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for parameter in parameters:
        alike.setdefault(dims(parameter), []).append(parameter)
    owners = {}
    for value in optimizer:
        same, path = alike.get(dims(value), []), paths[value]
        ranked = [(_common_end(paths[parameter], path), -parameter) for parameter in same]
        owners[value] = -max(ranked)[1] if ranked else value
    return owners


def _common_end(one: str, other: str) -> int:
    """How many path components two paths have in common, counted from the end."""
    pairs: Iterable[tuple[str, str]] = zip(reversed(one.split("/")), reversed(other.split("/")), strict=False)
    count = 0
    for a, b in pairs:
        if a != b:
            break
        count += 1
    return count
