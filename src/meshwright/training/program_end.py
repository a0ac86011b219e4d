"""Calls a function at the end of the program, while threads can still be started.

Functions of `atexit` are called too late for what still needs threads: executors are closed by then, and since Python
3.12 the interpreter refuses new threads as soon as it begins to shut down. It begins when the outermost frame of the
main thread is left, by a return or an exception. That frame is watched by `sys.monitoring`, which costs nothing as long
as it runs. Before Python 3.12 a hook of `threading` comes early enough; it is the one that executors use themselves.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any


def call_at_end(function: Callable[[], None]) -> None:
    """Calls a function when the main thread has done its work; `function` may start threads and wait for them."""
    if sys.version_info < (3, 12):
        threading._register_atexit(function)  # type: ignore[attr-defined]
        return
    _watch(function)


def _watch(function: Callable[[], None]) -> None:
    watcher: Any = sys.monitoring  # type: ignore[attr-defined]
    tool = next((number for number in (3, 4, 1, 2) if watcher.get_tool(number) is None), None)
    if tool is None:  # debuggers and profilers have taken all of them
        return
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back is not None:
        frame = frame.f_back
    outermost = frame.f_code

    def on_leaving(code: Any, *_: Any) -> None:
        if code is outermost and threading.current_thread() is threading.main_thread():
            function()

    # The tool's number stays taken, as the event is the end of the program; others that watch it are not affected.
    watcher.use_tool_id(tool, "meshwright")
    for event in (watcher.events.PY_RETURN, watcher.events.PY_UNWIND):
        watcher.register_callback(tool, event, on_leaving)
    watcher.set_events(tool, watcher.events.PY_UNWIND)  # which cannot be watched for one code alone
    watcher.set_local_events(tool, outermost, watcher.events.PY_RETURN)
