"""Keeps TensorStore from printing tracebacks of writes that end after the save that they are part of has failed.

Orbax waits for the writes of a save in an event loop, and closes it when the first of them fails. Every other write
that ends later finds the loop closed, and TensorStore, which has nobody to raise this to, hands it to
`sys.unraisablehook` from a thread of its own. The save itself raises the error of the write that failed.
"""

import sys
from typing import Any


def drop_late_writes() -> None:
    """From now on `sys.unraisablehook` drops such errors; it may be called again, also after others have set a hook."""
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
