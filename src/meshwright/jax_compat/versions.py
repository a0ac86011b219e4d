"""The releases of JAX that Meshwright runs on: what a newer one may have changed is met with a sentence."""

import logging
from importlib import import_module
from types import ModuleType

import jax

from meshwright.errors import MeshwrightError

log = logging.getLogger("meshwright")

OLDEST, NEWEST = (0, 10), (0, 12)  # all tests pass on both, and on those between
RANGE = f"jax>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"


def private(module: str, *names: str) -> ModuleType:
    """A module of JAX that is private or unstable, once it is certain to have the names that are used.

    Raises:
        MeshwrightError: The installed release has another module, or none of a name.
    """
    try:
        found = import_module(module)
    except ImportError:
        raise _lacking(module) from None
    for name in names:
        if not hasattr(found, name):
            raise _lacking(f"{module}.{name}")
    return found


def _lacking(name: str) -> MeshwrightError:
    return MeshwrightError(f"jax {jax.__version__} has no {name}, which this version needs: install {RANGE!r}")


def warn_of_newer() -> None:
    """Says in one line that a release is newer than those that were tried."""
    if tuple(int(part) for part in jax.__version__.split(".")[:2]) > NEWEST:
        log.warning("jax %s is newer than what was tried: where anything fails, install %r", jax.__version__, RANGE)
