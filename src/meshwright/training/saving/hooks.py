"""Hooks of the interpreter: what is to be done at the end of the program, and errors that nobody could raise.

Functions of `atexit` are called too late for what still needs threads: executors are closed by then, and since Python
3.12 the interpreter refuses new threads as soon as it begins to shut down. It begins when the outermost frame of the
main thread is left, by a return or an exception. That frame is watched by `sys.monitoring`, which costs nothing as long
as it runs. Before Python 3.12 a hook of `threading` comes early enough; it is the one that executors use themselves.

Orbax waits for the writes of a save in an event loop, and closes it when the first of them fails. Every other write
that ends later finds the loop closed, and TensorStore, which has nobody to raise this to, hands it to
`sys.unraisablehook` from a thread of its own. The save itself raises the error of the write that failed.
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


def drop_late_writes() -> None:
    """From now on `sys.unraisablehook` drops errors of late writes; call it again where others may have set a hook."""
    # It stays: nothing tells when TensorStore's last write has ended. All other errors go to the hook that was there.
    if not getattr(sys.unraisablehook, "drops_late_writes", False):
        before = sys.unraisablehook

        def hook(unraisable: Any) -> None:
            if not _is_late_write(unraisable.exc_value, unraisable.exc_traceback):
                before(unraisable)

        hook.drops_late_writes = True  # type: ignore[attr-defined]
        sys.unraisablehook = hook


def _is_late_write(error: BaseException | None, trace: Any) -> bool:
    """Whether an error is a closed event loop's, which no Python code has called: a library's own thread has."""
    if not isinstance(error, RuntimeError) or str(error) != "Event loop is closed" or trace is None:
        return False
    return str(trace.tb_frame.f_globals.get("__name__", "")).startswith("asyncio.")
