"""Refinements: optional steps that improve a plan or the accuracy of its figures, with a fallback for each.

A refinement that fails unexpectedly is skipped, and the plan says so in its remarks: a function is planned in the plain
way rather than not at all. Where `MESHWRIGHT_STRICT` is set, as in our tests, it fails instead.
"""

import os
from collections.abc import Callable
from typing import TypeVar

from meshwright.errors import MeshwrightError

T = TypeVar("T")

STRICT = "MESHWRIGHT_STRICT"


def is_strict() -> bool:
    """Whether a refinement that fails is an error."""
    return os.environ.get(STRICT, "") not in ("", "0")


class Refinements:
    """Runs the refinements of one plan.

    Attributes:
        remarks: The refinements that were skipped, with the reason; a sentence each.
        plain: Whether all of them are left out.
        strict: Whether one that fails is an error.
    """

    def __init__(self, remarks: list[str] | None = None, plain: bool = False, strict: bool = False):
        self.remarks: list[str] = [] if remarks is None else remarks
        self.plain = plain
        self.strict = strict or is_strict()

    def __call__(self, what: str, instead: str, refine: Callable[[], T], plain: Callable[[], T]) -> T:
        """The result of a refinement, or of the plain way if it fails.

        Args:
            what: The refinement, as a sentence begins: "The model of fusion".
            instead: The consequence of skipping it, as the end of a sentence: "every value counts as stored".
            refine: Does it.
            plain: Does without.
        """
        if self.plain:
            return plain()
        try:
            return refine()
        except (MeshwrightError, MemoryError):  # these are about the user's input and machine
            raise
        except Exception as error:
            if self.strict:
                raise
            said = f"{type(error).__name__}: {error}".replace("\n", " ")
            remark = f"{what} failed unexpectedly ({said:.200}) and was skipped: {instead}."
            if remark not in self.remarks:
                self.remarks.append(remark)
            return plain()

    def without(self) -> "Refinements":
        """The same with all refinements left out; remarks are shared."""
        return Refinements(self.remarks, plain=True, strict=self.strict)

    def again(self) -> "Refinements":
        """The same with none left out."""
        return Refinements(self.remarks, strict=self.strict)
