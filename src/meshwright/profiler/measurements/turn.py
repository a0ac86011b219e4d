"""One profiler at a time: two that measure on one machine would measure each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from meshwright.profiler.database import cache_folder
from meshwright.scratch import claimed

LOCK_NAME = "profiler.lock"


@contextmanager
def my_turn(say: Callable[[str], None]) -> Iterator[None]:
    """Waits until no other process of this user profiles here, and says that it waits; then keeps others waiting."""
    lock = cache_folder() / LOCK_NAME
    with suppress(OSError):  # without a folder there is nobody to wait for
        lock.parent.mkdir(parents=True, exist_ok=True)
    with claimed(lock, patient=False) as is_mine:
        if is_mine:
            yield
            return
    say("another profiler is measuring on this machine: waiting for it")
    with claimed(lock):
        yield
