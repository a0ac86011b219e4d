"""`mw.preempted`: whether this run was asked to end by SIGTERM, as schedulers do before they take a machine away."""

import signal
from threading import current_thread, main_thread
from typing import Any

from meshwright import jax_devices
from meshwright.errors import ProcessError


def preempted() -> bool:
    """Whether the run was asked to end (SIGTERM), so that it can save its state first.

    Call it once a step, in all processes. If any of them receives SIGTERM, all return True at the same step, and from
    then on. In a process that runs alone, SIGTERM before the first call and a second SIGTERM end the process as usual.
    With several processes JAX receives the signal, which then does nothing but make this function return True: the
    scheduler kills what does not end within its grace period.

    Raises:
        ProcessError: The first call is not made in the main thread, where alone Python can receive signals. With
            `mw.initialize`, `jax.distributed.initialize` or under Ray any thread may call it.

    Examples:
        >>> import meshwright as mw
        >>> for step, batch in enumerate(batches):  # doctest: +SKIP
        ...     state, metrics = train_step(state, batch)
        ...     if mw.preempted():
        ...         mw.save("runs/first", step, state)
        ...         break
    """
    return watch.look()


class _Watch:
    """The signal as this process has seen it.

    Attributes:
        is_asked: Whether the run was asked to end.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._num_calls = 0
        self._before: Any = None  # the handler that ours replaced; None as long as it is not installed

    def look(self) -> bool:
        self._num_calls += 1
        if not self.is_asked and jax_devices.has_preemption_service():
            from jax.experimental.multihost_utils import reached_preemption_sync_point

            self.is_asked = reached_preemption_sync_point(self._num_calls)
        elif self._before is None and not self.is_asked:
            self._install()
        return self.is_asked

    def _install(self) -> None:
        if current_thread() is not main_thread():
            raise ProcessError(
                "mw.preempted() was called outside of the main thread; call it there once, before others"
            )
        self._before = signal.signal(signal.SIGTERM, self._handle) or signal.SIG_DFL

    def _handle(self, number: int, frame: Any) -> None:
        self.is_asked = True
        signal.signal(number, self._before)  # so that a second signal ends the process
        if callable(self._before):
            self._before(number, frame)


watch = _Watch()
