"""A save that is under way, in the background or not: Orbax writes what it is given."""

import atexit
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from threading import Thread
from typing import Any, NamedTuple

import jax

from meshwright.errors import CheckpointError
from meshwright.runtime.processes import peers
from meshwright.training.in_memory.files import forget_older
from meshwright.training.saving.barrier import SaveBarrier
from meshwright.training.saving.files import (
    clean,
    flush,
    full_path,
    listed,
    manager,
    orbax,
    reason,
    remove,
    try_folder,
)
from meshwright.training.saving.hooks import call_at_end, drop_late_writes

log = logging.getLogger("meshwright")


class _WithoutTracebacks(logging.Filter):
    """Drops the tracebacks that Orbax's threads log: the error is raised as well, and is then said in one sentence."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and "orbax" in record.pathname)


class _Exists(CheckpointError):
    """There is such a checkpoint already."""


class Contents(NamedTuple):
    """What a checkpoint consists of.

    Attributes:
        items: Orbax's arguments, by item.
        of_owners: Whether some processes have some of the arrays alone.
    """

    items: dict[str, Any]
    of_owners: bool


class Saving:
    """A checkpoint that is being written; `mw.save` with ``wait=False`` returns it."""

    def __init__(self, directory: str | PathLike[str], step: int, keep: int | None):
        self._directory, self._step, self._keep = directory, step, keep
        self._path = full_path(directory)  # now: the program may change its folder while this is written
        self._earlier: list[int] = []
        self._manager: Any = None
        self._thread: Thread | None = None
        self._error: CheckpointError | None = None
        self._barrier = SaveBarrier()
        self._is_writing = False
        self._is_awaited = False
        self._quiet = _WithoutTracebacks()

    def __str__(self) -> str:
        return f"the checkpoint of step {self._step} in {self._directory}"

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is complete, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the checkpoint is complete.

        Raises:
            CheckpointError: It could not be saved. It is raised once: by this method, the next `mw.save` or
                `mw.restore`, whichever comes first. Until then the log has it, as soon as it is known.
        """
        self._is_awaited = True
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def begin(self, contents: Callable[[SaveBarrier], Contents]) -> None:
        """Starts writing, and returns when the arrays themselves are no longer needed."""
        self._attempt(lambda: self._open(contents(self._barrier)))

    def finish(self) -> None:
        """Waits for the files, and then until the checkpoints that are not to be kept are removed."""
        self._attempt(self._complete)
        forget_older(str(self._path), self._step)
        if self._keep is None:
            return
        if jax.process_index() == 0:
            self._remove(self._earlier[: max(0, len(self._earlier) - self._keep + 1)])
        self._barrier("removed")  # the next save lists the checkpoints

    def in_background(self, contents: Callable[[SaveBarrier], Contents] | None = None) -> None:
        """Does the same in the background, after beginning to write some contents unless it has begun."""
        global _pending
        if _pending is None:
            call_at_end(_finish)
            atexit.register(_fail_if_lost)
        self._thread = Thread(target=self._run, args=(contents,), name="meshwright-saving", daemon=True)
        self._thread.start()
        _pending = self

    def _open(self, contents: Contents) -> None:
        # Orbax's threads wait twenty minutes for a folder that cannot be made, and the program cannot end meanwhile. It
        # is tried before there is a manager, which removes such folders in a thread of its own.
        if jax.process_index() == 0:
            try_folder(self._path, self._step)
        self._barrier("writable")
        options = orbax().options.AsyncOptions(barrier_sync_fn=self._barrier)
        chosen = {"cleanup_tmp_directories": True, "async_options": options}
        self._manager = manager(self._path, is_async=True, of_owners=contents.of_owners, **chosen)
        self._earlier = sorted(self._manager.all_steps())
        if self._step in self._earlier:
            raise _Exists(f"{self._directory} has step {self._step} already; save under another step or delete it")
        self._manager.save(self._step, args=orbax().args.Composite(**contents.items), force=True)
        self._is_writing = True

    def _complete(self) -> None:
        self._manager.close()
        flush(self._path / str(self._step))

    def _remove(self, steps: list[int]) -> None:
        try:
            for step in steps:
                remove(self._path, step)
        except CheckpointError as error:
            self._barrier.fail(error)
            raise

    def _attempt(self, do: Callable[[], None]) -> None:
        """Turns whatever fails into an error that says what is intact."""
        orbax_log = logging.getLogger("absl")
        try:
            orbax_log.addFilter(self._quiet)
            drop_late_writes()
            do()
        except _Exists:
            self._give_up()
            raise
        except Exception as error:
            self._barrier.fail(error)
            self._give_up()
            # Until Orbax has begun to write, the others may be at barriers of its own, which know of no failure.
            if (self._is_writing or jax.process_count() == 1) and self._barrier.leave():
                with suppress(Exception):
                    clean(self._path)
            there = self._earlier
            intact = f"; {listed(there)} there {'is' if len(there) == 1 else 'are'} intact" if there else ""
            raise CheckpointError(
                f"step {self._step} could not be saved in {self._directory}: {reason(error)}{intact}. Nothing of the "
                "state is lost: save it again, here or elsewhere"
            ) from error
        finally:
            orbax_log.removeFilter(self._quiet)

    def _give_up(self) -> None:
        if self._manager is not None:
            with suppress(Exception):  # it raises the error that is being handled once more
                self._manager.close()

    def _run(self, contents: Callable[[SaveBarrier], Contents] | None) -> None:
        try:
            if contents is not None:
                self.begin(contents)
            self.finish()
        except CheckpointError as error:
            self._error = error
        except BaseException as error:  # it must reach the thread that waits
            self._error = CheckpointError(f"step {self._step} could not be saved: {reason(error)}")
        if self._error is not None and not self._is_awaited:  # the next save may be hours away
            log.error("%s", self._error)


_pending: Saving | None = None  # the last save in the background: there is one at a time


def wait_for_saves() -> None:
    """Waits for a save in the background, and raises its error if nobody has seen it."""
    if _pending is not None:
        _pending.wait()


def _finish() -> None:
    """Waits at the end of the program; an error must not hide another one that ends it."""
    try:
        wait_for_saves()
    except CheckpointError as error:
        _report(error)


def _fail_if_lost() -> None:
    """Ends the program with an exit code that says so if its last checkpoint is lost."""
    if _pending is not None and not _pending.is_done:
        _report(CheckpointError(f"{_pending} was not complete when the program ended; call its wait() before"))
    if _is_lost:
        peers.end_process()


def _report(error: CheckpointError) -> None:
    global _is_lost
    _is_lost = True
    print(f"meshwright: {error}", file=sys.stderr, flush=True)
    if peers.current is not None:
        peers.current.fail(f"process {peers.current.process} ended with {peers.describe_error(error)}")


_is_lost = False
