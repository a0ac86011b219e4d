"""Which parameter a leaf of the optimizer's state belongs to."""

from collections.abc import Iterable, Sequence

from meshwright.explain.dims import DimClasses


def find_owners(
    classes: DimClasses, paths: Sequence[str], parameters: Iterable[int], optimizer: Iterable[int]
) -> dict[int, int]:
    """For each leaf of the optimizer the parameter of the same dims and of the most similar path; itself for none."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for parameter in parameters:
        alike.setdefault(tuple(classes.of(parameter)), []).append(parameter)
    found = {}
    for value in optimizer:
        same, path = alike.get(tuple(classes.of(value)), []), paths[value]
        ranked = [(_common_end(paths[parameter], path), -parameter) for parameter in same]
        found[value] = -max(ranked)[1] if ranked else value
    return found


def _common_end(one: str, other: str) -> int:
    """How many path components two paths have in common, counted from the end."""
    pairs: Iterable[tuple[str, str]] = zip(reversed(one.split("/")), reversed(other.split("/")), strict=False)
    count = 0
    for a, b in pairs:
        if a != b:
            break
        count += 1
    return count
