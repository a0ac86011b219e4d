"""Ctrl-C in a step: the results of a call that takes its arguments over reach the caller before the interrupt.

A step that donates its state has nothing but its results to show for it. Python raises KeyboardInterrupt as soon as the
compiled call returns, before the caller has them: both the old and the new state would be lost.
"""

import signal
from threading import Timer, get_ident, main_thread
from types import FrameType
from typing import Any

_MAIN = main_thread().ident or 0
_SOON_S = 0.05  # in which the caller has given the results a name


class _Holding:
    """A context in the main thread in which Ctrl-C waits; a second one does not."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_pending = False
        self._is_installed = False

    def __enter__(self) -> None:
        if get_ident() != _MAIN:  # signals are the main thread's
            return
        if self._is_pending:  # nothing is donated yet
            self._is_pending = False
            raise KeyboardInterrupt
        if not self._is_installed and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # It stays, since exchanging it costs more than a call may: outside of this context it is Python's own.
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
            raise KeyboardInterrupt("in a step that was given its state, which is lost: restore it from a checkpoint")
        self._is_pending = True

    def _release(self) -> None:
        if self._is_pending:
            self._is_pending = False
            signal.pthread_kill(_MAIN, signal.SIGINT)  # wakes the main thread, whatever it waits for


hold = _Holding()
