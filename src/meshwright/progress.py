"""Shows the progress of a long call on one line of stderr, which is removed when the call returns.

Nothing is shown of calls that take less than two seconds, nor with ``MESHWRIGHT_PROGRESS=0``, nor by any but the first
of several processes. On a terminal and in a notebook the line is written over and over; elsewhere each stage has its
own.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]

_AFTER_S = 2.0
_EVERY_S = 0.5

_shown: list["Line"] = []  # the line of the outermost call, while there is one


@contextmanager
def progress(on_progress: Say | None = None) -> Iterator[Say]:
    """Shows the progress of a call; yields the function that announces a new stage.

    Args:
        on_progress: Called with each stage instead of showing it.
    """
    if on_progress is not None or _shown or not _is_wanted():
        with _told_of_compiling(on_progress or (_shown[0].say if _shown else _ignore)) as say:
            yield say
        return
    line = Line()
    _shown.append(line)
    try:
        with _told_of_compiling(line.say) as say:
            yield say
    finally:
        _shown.remove(line)
        line.close()


class Line:
    """The stage that a call is in, and since when it runs, written by a thread of its own."""

    def __init__(self) -> None:
        self._started = self._entered = time.perf_counter()
        self._stage, self._written = "", ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="meshwright progress", daemon=True)
        self._thread.start()

    def say(self, stage: str) -> None:
        """Enters a stage."""
        if stage != self._stage:
            self._stage, self._entered = stage, time.perf_counter()

    def close(self) -> None:
        """Takes the line away."""
        self._over.set()
        self._thread.join()
        if self._written and _is_rewritable():
            _write("\r" + " " * len(self._written) + "\r")

    def _tick(self) -> None:
        wait = _AFTER_S
        while not self._over.wait(wait):
            wait = _EVERY_S
            now = time.perf_counter()
            text = f"meshwright {now - self._started:5.0f} s  {self._stage}"
            if _is_rewritable():
                text += f", {now - self._entered:.0f} s so far"
                text = text[: shutil.get_terminal_size().columns - 1]  # a line that is broken cannot be written over
                _write("\r" + text.ljust(len(self._written)))
                self._written = text
            elif self._stage != self._written:
                _write(text + "\n")
                self._written = self._stage


@contextmanager
def _told_of_compiling(say: Say) -> Iterator[Say]:
    """Shows the compilation of kernels as stages; the interrupted stage is shown again afterwards."""
    from meshwright.jit import compiling

    stage = ""

    def enter(name: str) -> None:
        nonlocal stage
        stage = name
        say(name)

    def compile(what: str | None) -> None:
        say(stage if what is None else what)

    compiling.watchers.append(compile)
    try:
        yield enter
    finally:
        compiling.watchers.remove(compile)


def _is_wanted() -> bool:
    return os.environ.get("MESHWRIGHT_PROGRESS", "1") != "0" and sys.stderr is not None and _is_first_process()


def _is_first_process() -> bool:
    import jax

    return not jax.distributed.is_initialized() or jax.process_index() == 0


def _is_rewritable() -> bool:
    """Whether output can be overwritten: on a terminal, or in a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):  # the stream was closed meanwhile; only progress output is lost
        pass


def _ignore(_: str) -> None:
    pass
