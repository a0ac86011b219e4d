"""One profiler at a time: two that measure on one machine would measure each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshwright.profiler.database import cache_folder

try:
    import fcntl as _fcntl
except ImportError:  # not a POSIX system: nobody waits
    _fcntl = None  # type: ignore[assignment]

LOCK_NAME = "profiler.lock"


@contextmanager
def my_turn(say: Callable[[str], None]) -> Iterator[None]:
    """Waits until no other process of this user profiles here, and says that it waits; then keeps others waiting."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK_NAME, "w")  # noqa: SIM115 - held until the turn is over
    except OSError:  # without a folder there is nobody to wait for
        yield
        return
    with file:
        if _fcntl is not None:
            try:
                _fcntl.flock(file, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
            except BlockingIOError:
                say("another profiler is measuring on this machine: waiting for it")
                _fcntl.flock(file, _fcntl.LOCK_EX)
        yield
