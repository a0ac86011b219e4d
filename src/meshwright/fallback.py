"""Models that a plan can do without: where one fails unexpectedly, the plan is valid all the same, and says so.

There are three. Without the model of XLA's fusion (`cost/xla_gpu`), every value counts as stored, so that no plan uses
more memory than predicted. Without the lower bound, the plan is the same and the gap to the best plan is not known.
Without a built-in rule (`rules/registry.py`), every device runs the operation whole, and `plan.unsplittable` names it.
Any other failure is an error. Where `MESHWRIGHT_STRICT` is set, as in our tests and benchmarks, these are errors, too.
"""

import os
from collections.abc import Callable
from typing import TypeVar

from meshwright.errors import MeshwrightError

T = TypeVar("T")

STRICT = "MESHWRIGHT_STRICT"


def is_strict() -> bool:
    """Whether a model that fails is an error."""
    return os.environ.get(STRICT, "") not in ("", "0")


def with_fallback(
    remarks: list[str] | None, what: str, instead: str, model: Callable[[], T], plain: Callable[[], T]
) -> T:
    """The result of a model, or of doing without it if it fails.

    Args:
        remarks: Gets a sentence about a model that failed; without a list, failing is an error.
        what: The model, as a sentence begins: "The model of fusion".
        instead: The consequence of doing without, as the end of a sentence: "every value counts as stored".
        model: Applies it.
        plain: Does without.
    """
    if remarks is None or is_strict():
        return model()
    try:
        return model()
    except (MeshwrightError, MemoryError):  # these are about the user's input and machine
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}".replace("\n", " ")
        remarks.append(f"{what} failed unexpectedly ({said:.200}) and was skipped: {instead}.")
        return plain()
