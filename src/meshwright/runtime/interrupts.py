"""Delays Ctrl-C in a step until the results of a call that donates its arguments have reached the caller.

After a step that donates its state, only its results hold the state. Python raises KeyboardInterrupt as soon as the
compiled call returns, before the caller has the results: both the old and the new state would be lost.
"""

import signal
from threading import Timer, get_ident, main_thread
from types import FrameType
from typing import Any

_MAIN = main_thread().ident or 0
_SOON_S = 0.05  # by then the caller has bound the results to a name


class _Holding:
    """A context in the main thread in which Ctrl-C waits; a second one does not."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_pending = False
        self._is_installed = False

    def __enter__(self) -> None:
        if get_ident() != _MAIN:  # only the main thread receives signals
            return
        if self._is_pending:  # nothing is donated yet
            self._is_pending = False
            raise KeyboardInterrupt
        if not self._is_installed and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # The handler stays installed, since replacing it at every call costs too much: outside of this context it
            # does what Python's own handler does.
            signal.signal(signal.SIGINT, self._handle)
            self._is_installed = True
        self._depth += 1

    def __exit__(self, *_: Any) -> None:
        if get_ident() != _MAIN:
            return
        self._depth -= 1
        if self._is_pending and not self._depth:
            later = Timer(_SOON_S, self._release)
            later.daemon = True
            later.start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._depth:
            signal.default_int_handler(number, frame)
        elif self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt("in a step that donated its state, which is lost: restore it from a checkpoint")
        self._is_pending = True

    def _release(self) -> None:
        if self._is_pending:
            self._is_pending = False
            signal.pthread_kill(_MAIN, signal.SIGINT)  # wakes the main thread from any wait


hold = _Holding()
