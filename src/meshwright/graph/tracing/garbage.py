"""Keeps Python's cyclic garbage collector out of work that makes hundreds of thousands of objects which all stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_INTERPRETERS_OWN = 1000  # CPython 3.12 starts with a few hundred frozen objects; whoever freezes a heap, freezes more


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the collector, which else would look through all that was made again and again and find nothing.

    Tracing 80 layers took a quarter longer with it. What was made is old afterwards, so that no later collection of
    young objects looks through it either.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not _is_frozen():  # else the caller has frozen objects, and they must stay so
            gc.freeze()
            gc.unfreeze()
        gc.enable()


@contextmanager
def heap_frozen() -> Iterator[None]:
    """Keeps the collector away from all that is there already; what is made meanwhile is collected as ever.

    After a trace one look through everything takes as long as planning dozens of layers.
    """
    if _is_frozen():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _is_frozen() -> bool:
    return gc.get_freeze_count() > _INTERPRETERS_OWN
