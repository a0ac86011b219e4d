"""Checkpoints as folders on disk: flushed, removed, and cleared of what an interrupted save left."""

import errno
import os
import re
from functools import cache
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import jax
import numpy as np

from meshwright.errors import CheckpointError

if TYPE_CHECKING:
    from etils import epath
    from orbax.checkpoint import CheckpointManager

_ITEMS = ("arrays", "leaves")


def orbax() -> ModuleType:
    """The library that writes and reads checkpoints."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise CheckpointError(
            "mw.save and mw.restore need Orbax, which is not installed: pip install 'meshwright[train]'"
        ) from error
    return ocp


def full_path(directory: str | PathLike[str]) -> "epath.Path":
    """The directory's absolute path, as Orbax has paths: it may be in a bucket.

    Raises:
        CheckpointError: It is no path, or of a kind of storage that cannot be reached from here.
    """
    from etils import epath

    text = os.fspath(directory) if isinstance(directory, str | PathLike) else directory
    if not isinstance(text, str):
        raise CheckpointError(f"the directory is {directory!r:.60}; give a path, such as 'checkpoints'")
    if re.match(r"[a-z0-9]{2,}:/(?!/)", text):
        raise CheckpointError(
            f"{text} lacks a slash, which pathlib drops: give 'gs://bucket/folder' or the like as text"
        )
    kind, separator, rest = text.partition("://")
    if not separator:
        path = epath.Path(text).expanduser()
        return path if path.is_absolute() else path.absolute()
    if kind == "file" and rest.removeprefix("localhost").startswith("/"):
        return epath.Path(unquote(rest.removeprefix("localhost")))
    try:
        path = epath.Path(text)
        path.exists()  # only now is the library loaded that reaches this kind of storage
    except KeyError:
        raise CheckpointError(f"{text} is of a kind that Orbax cannot reach; give a path, or gs:// or s3://") from None
    except Exception as error:
        raise CheckpointError(f"{text} cannot be reached: {reason(error)}; or give a path on a disk") from error
    return path


def manager(
    directory: str | PathLike[str], *, is_async: bool = False, of_owners: bool = False, **options: Any
) -> "CheckpointManager":
    """Orbax's manager of a directory.

    With ``of_owners`` the first copy of each array is written, and not a part of each copy; arrays are then given to
    Orbax by `PyTreeSave` and `PyTreeRestore`, which take some of a checkpoint's as well. The files are the same.

    With several processes Orbax would wait for all of them by a program on their devices, which may never end while
    other programs run there; if it is told the processes, it waits at barriers of JAX's coordination service.
    It does not read the times of checkpoints, which nobody asks for: another program may be removing one of them.
    """
    ocp = orbax()
    if jax.process_count() > 1:
        if options.pop("create", True):
            full_path(directory).mkdir(parents=True, exist_ok=True)
        everyone = ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())))
        options |= {"create": False, "multiprocessing_options": everyone}
    options |= {"save_root_metadata": False, "lightweight_initialize": True}
    chosen = ocp.CheckpointManagerOptions(enable_async_checkpointing=is_async, **options)
    handlers = _owners_handlers() if of_owners else None
    return _manager_class()(full_path(directory), options=chosen, item_names=_ITEMS, item_handlers=handlers)


def _owners_handlers() -> dict[str, Any]:
    ocp = orbax()
    kinds = ocp.type_handlers
    registry = kinds.create_type_handler_registry(
        (jax.Array, kinds.ArrayHandler(use_replica_parallel=False)), (np.ndarray, kinds.NumpyHandler())
    )
    return {
        "arrays": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
        "leaves": ocp.JsonCheckpointHandler(),
    }


@cache
def _manager_class() -> type["CheckpointManager"]:
    base: Any = orbax().CheckpointManager

    class Manager(base):
        """Leaves the signal to `mw.preempted`: JAX agrees on one step, and Orbax would ask for others in between."""

        def reached_preemption(self, step: int) -> bool:
            return False

    return Manager


def flush(path: Any) -> None:
    """Waits until a finished checkpoint is on disk: Orbax does not flush its small files."""
    folder = Path(os.fspath(path))
    if not folder.is_dir():  # in a bucket, where writes are durable
        return
    try:
        for file in (*folder.rglob("*"), folder, folder.parent):
            number = os.open(file, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)
    except OSError:
        path.rmtree()  # it is not known which of its files are on disk
        raise


def remove(directory: str | PathLike[str], step: int) -> None:
    """Removes a checkpoint; if it is interrupted, the next save removes the rest."""
    path = full_path(directory) / str(step)
    try:
        # Under this name a folder that is removed in part is not taken for a checkpoint.
        path.rename(leaving := path.parent / f"{step}.removed.orbax-checkpoint-tmp")
        leaving.rmtree()
    except OSError as error:
        raise CheckpointError(f"step {step} in {directory} could not be deleted: {reason(error)}") from error


def try_folder(directory: str | PathLike[str], step: int) -> None:
    """Makes a folder beside that of a checkpoint, and removes it; raises what the disk says to that."""
    path = full_path(directory) / f"{step}.tried.orbax-checkpoint-tmp"
    path.mkdir(parents=True, exist_ok=True)
    path.rmtree()


def clean(directory: str | PathLike[str]) -> None:
    """Removes the partial files of a failed save, which may be what fills the disk."""
    is_leftover = orbax().path.step.is_path_temporary
    for path in filter(is_leftover, list(full_path(directory).iterdir())):
        path.rmtree()


def listed(steps: list[int]) -> str:
    """The last of some steps, in words."""
    shown = ", ".join(map(str, steps[-5:]))
    return f"step {shown}" if len(steps) == 1 else f"steps {'…, ' if len(steps) > 5 else ''}{shown}"


def reason(error: BaseException) -> str:
    """The error in one sentence; a full disk is named, however deep in the chain of causes it is."""
    cause: BaseException | None = error
    while cause is not None:
        full = getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if full or "ENOSPC" in str(cause) or "No space left" in str(cause):
            return "the disk is full: make room"
        cause = cause.__cause__ or cause.__context__
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, CheckpointError) else f"{type(error).__name__}: {first:.300}"
