"""Methods by their short names, as users give them: in calls, in settings and to the command."""

from collections.abc import Iterable

from meshwright.errors import ShardingError
from meshwright.planner.methods import NAMED, Auto, Method

METHOD_NAMES: dict[str, Method] = dict(zip(("data", "zero1", "zero2", "zero3", "tensor"), NAMED, strict=True))
METHOD_NAMES = {"auto": Auto(), **METHOD_NAMES}


def find_method(given: Method | str | None) -> Method:
    """The method that a user gives as a `Method`, as its short name, or as None for `Auto`.

    Examples:
        >>> find_method("zero3"), find_method("Zero-3").name
        (Zero(memory_fraction=0.9, stage=3), 'Zero-3')

    Raises:
        ShardingError: It is neither; the message lists the names.
    """
    if given is None:
        return Auto()
    if isinstance(given, Method):
        return given
    if isinstance(given, str):
        wanted = _plain(given)
        for name, method in METHOD_NAMES.items():
            if wanted in (name, _plain(method.name)):
                return method
    raise ShardingError(
        f"method is {given!r:.60}; give one of {', '.join(map(repr, METHOD_NAMES))}, or a method such as "
        "mw.Auto(…), mw.Zero(3) or mw.ThreeD(…)"
    )


def find_methods(given: str | Iterable[Method | str]) -> tuple[Method, ...]:
    """Several methods: a list of methods or of their names, or names separated by commas."""
    parts = given.split(",") if isinstance(given, str) else given
    found = tuple(find_method(part) for part in parts if not isinstance(part, str) or part.strip())
    if not found:
        raise ShardingError(f"methods is {given!r}; give some of {', '.join(map(repr, METHOD_NAMES))}")
    return found


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "").replace("_", "")
