"""Checkpoints of a training state, by Orbax: each is written completely or not at all, and restored onto any mesh."""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from operator import index
from os import PathLike
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding
from jax.tree_util import tree_structure, tree_unflatten, treedef_tuple

from meshwright.errors import CheckpointError
from meshwright.runtime.placement import argument_shardings
from meshwright.runtime.stages.cutting.layer_stack import StackSharding, spread_sharding
from meshwright.runtime.stages.placing import absent, is_here
from meshwright.schema import checked
from meshwright.training.in_memory.copies import keep as keep_in_memory
from meshwright.training.in_memory.copies import recall
from meshwright.training.parallelize import Parallelized
from meshwright.training.saving.barrier import SaveBarrier
from meshwright.training.saving.checksums import checksums, joined, local_sums
from meshwright.training.saving.files import full_path, listed, manager, orbax, reason
from meshwright.training.saving.leaves import (
    SavedLeaf,
    Wanted,
    check_alike,
    describe,
    named_leaves,
    stored,
    words_of,
)
from meshwright.training.saving.snapshot import snapshot
from meshwright.training.saving.spread import Views, all_have_one, moved, of_some_processes
from meshwright.training.saving.under_way import Contents, Saving, wait_for_saves

_FORMAT = "meshwright-checkpoint"
_VERSION = 2  # the first has no checksums, and its paths do not escape separators within keys
log = logging.getLogger("meshwright")


def save(
    directory: str | PathLike[str], step: int, state: Any, *, keep: int | None = None, wait: bool = True
) -> Saving | None:
    """Saves a training state.

    The state may be donated to the next step as soon as the call returns. A save that is interrupted, by an error or by
    the end of the process, leaves all earlier checkpoints as they were; the next save removes its partial files. With
    several processes all of them must call it, with the same directory on a disk that they share.

    Args:
        directory: Holds the checkpoints, one folder a step; it is created if there is none.
        step: The number of the step; a step is saved once.
        state: A pytree. Arrays, random keys and Python numbers are saved; other leaves, such as functions, are code and
            come from the program that restores.
        keep: How many checkpoints to keep, this one and the newest of the others; all by default. Others are removed
            once this one is complete.
        wait: Whether to return only when everything is on disk. Otherwise the state is copied to the host's memory and
            written in the background: the next save or restore and the end of the program wait for it, and raise what
            goes wrong.

    Returns:
        None, or without waiting a `Saving`, whose ``wait()`` waits and whose ``is_done`` says whether it is complete.

    Raises:
        CheckpointError: The state could not be saved, or an earlier one in the background. The state and all complete
            checkpoints are intact.

    Examples:
        >>> import tempfile, jax.numpy as jnp, meshwright as mw
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     mw.save(directory, 10, {"w": jnp.arange(3.0), "step": 10})
        ...     mw.restore(directory, like={"w": jnp.zeros(3), "step": 0})["w"].tolist()
        [0.0, 1.0, 2.0]
    """
    number = _step(step)
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise CheckpointError(f"keep is {keep!r}; give how many checkpoints to keep, 1 or more, or leave it out")
    if wait or find_spec("orbax") is None:
        orbax()  # loading it takes a second
    if full_path(directory).exists() and not full_path(directory).is_dir():
        raise CheckpointError(f"{directory} is a file; give a directory to save in")
    named = named_leaves(state)
    records = [describe(path, leaf) for path, leaf in named]
    leaves = moved([words_of(record, leaf) for record, (_, leaf) in zip(records, named, strict=True)])
    wait_for_saves()
    copies = None if wait else snapshot(leaves)
    saving = Saving(directory, number, keep)
    write = partial(_contents, str(full_path(directory)), number, records)
    if copies is not None:
        saving.in_background(partial(write, copies))
        return saving
    saving.begin(partial(write, leaves))
    if wait:
        saving.finish()
        return None
    saving.in_background()
    return saving


def _contents(directory: str, step: int, records: list[SavedLeaf], leaves: list[Any], barrier: SaveBarrier) -> Contents:
    """What is written, in the form that Orbax takes."""
    ocp = orbax()
    partly = of_some_processes(leaves, partial(barrier.agree, "owners"))
    arrays = {
        record.path: stored(record, leaf, some)
        for record, leaf, some in zip(records, leaves, partly, strict=True)
        if record.is_stored
    }
    sums = barrier.agree("checksums", local_sums(arrays), joined)
    noted = [asdict(replace(r, checksum=sums.get(r.path, ""))) for r in records]
    checksum = _checksum(noted)
    note = {"format": _FORMAT, "version": _VERSION, "leaves": noted, "checksum": checksum}
    keep_in_memory(directory, step, checksum, arrays)
    of_owners, view = any(partly), Views()
    views = {record.path: view(arrays[record.path]) for record, some in zip(records, partly, strict=True) if some}
    kept = ocp.args.PyTreeSave(arrays | views) if of_owners else ocp.args.StandardSave(arrays)
    items = {"leaves": ocp.args.JsonSave(note)} | ({"arrays": kept} if arrays else {})
    return Contents(items, of_owners)


def restore(directory: str | PathLike[str], *, like: Any, step: int | None = None) -> Any:
    """Restores a training state, each array in parts, onto the devices of its sharding.

    The mesh may differ from that of the run that saved the state. Every array is checked against the checksum that was
    saved with it. Nothing is written, so that a run that is still saving into the same directory is not disturbed.

    Args:
        directory: The directory that `save` wrote to.
        like: The parallelised function that the state is for, which must have a plan; or a pytree of arrays or
            `jax.ShapeDtypeStruct`s with shardings. Leaves that are neither arrays nor numbers come from it.
        step: The step to restore; the newest by default.

    Returns:
        The state.

    Raises:
        CheckpointError: There is no such checkpoint, it cannot be read, its arrays differ from those that were saved,
            or it is of another state.

    Examples:
        >>> import tempfile, jax.numpy as jnp, meshwright as mw
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     for step in (10, 20):
        ...         mw.save(directory, step, {"w": jnp.full(2, step)})
        ...     mw.restore(directory, like={"w": jnp.zeros(2, int)}, step=10)["w"].tolist()
        [10, 10]
    """
    _check_like(like)
    orbax()
    wait_for_saves()
    if not full_path(directory).is_dir():
        raise CheckpointError(f"there is no directory {directory}; give the one that mw.save wrote to")
    in_stages = isinstance(like, Parallelized) and like.last_plan is not None and bool(like.last_plan.stages)
    of_owners = in_stages and jax.process_count() > 1
    with manager(directory, create=False, of_owners=of_owners) as opened:
        steps = sorted(opened.all_steps())
        number = _chosen(directory, steps, step)
        try:
            return _restored(opened, directory, number, steps, like, of_owners)
        except CheckpointError:
            if step is not None or jax.process_count() > 1 or saved_steps(directory)[-1:] in ([], [number]):
                raise
    return restore(directory, like=like)  # a run that saves with `keep` has removed it meanwhile


def _restored(
    opened: Any, directory: str | PathLike[str], number: int, steps: list[int], like: Any, of_owners: bool
) -> Any:
    """The state of one step; ``of_owners``: some processes have some of its arrays, which they read alone."""
    where = f"the checkpoint of step {number} in {directory}"
    others = [s for s in steps if s != number]
    advice = f"; {listed(others)} can be tried with step=…" if others else ""
    note = _note(opened, number, where, advice)
    saved, version = note.leaves, note.version
    wanted, tree = _wanted(like, version)
    check_alike(saved, wanted, where)
    kinds, types = _as_read(saved, wanted, of_owners)
    saved_at = {s.path: s for s in saved}
    arrays = recall(str(full_path(directory)), number, note.checksum, kinds) if version > 1 else None
    if arrays is not None and (damaged := _damaged(arrays, saved_at)):
        log.warning("the copy of %s in memory is damaged in %s; it is read from disk", where, damaged)
        arrays = None
    elif arrays is not None:
        log.info("%s was read from the memory of the hosts", where)
    if arrays is None:
        try:
            arrays = _read_arrays(opened, number, types, of_owners) if types else {}
        except Exception as error:
            raise CheckpointError(f"{where} cannot be read: {reason(error)}{advice}") from error
        arrays |= {path: absent(kind, kind.sharding) for path, kind in kinds.items() if path not in types}
        arrays = {path: arrays[path] for path in kinds}  # in the same order in all processes
        if version == 1:
            log.warning("%s has no checksums, so its arrays cannot be verified; save it again", where)
        elif damaged := _damaged(arrays, saved_at):
            raise CheckpointError(
                f"{where} is damaged in {damaged}: the checksum of the data read differs from the saved one{advice}"
            )
    return tree_unflatten(tree, [w.fill(saved_at[w.path], arrays.get(w.path)) for w in wanted])


class _Note(NamedTuple):
    """What a checkpoint says of itself."""

    leaves: list[SavedLeaf]
    version: int
    checksum: str


def _note(opened: Any, number: int, where: str, advice: str) -> _Note:
    ocp = orbax()
    try:
        items = opened.restore(number, args=ocp.args.Composite(leaves=ocp.args.JsonRestore()))
        return _Note(*_read(items["leaves"], where), items["leaves"].get("checksum", ""))
    except CheckpointError:
        raise
    except Exception as error:
        message = f"{where} was not written by mw.save, or is damaged: {reason(error)}{advice}"
        raise CheckpointError(message) from error


def _as_read(
    saved: Sequence[SavedLeaf], wanted: Sequence[Wanted], of_owners: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The types of all arrays as they are read, and of those that this process reads."""
    places, saved_at = {w.path: w.sharding for w in wanted}, {s.path: s for s in saved if s.is_stored}
    alone = {w.path for w in wanted if of_owners and w.path in saved_at and w.is_read_in_place(saved_at[w.path])}
    alone = {path for path in alone if not all_have_one([places[path]])}
    if alone == saved_at.keys() and not all_have_one([places[path] for path in alone]):
        alone = set()  # Orbax waits for all processes, and one would have nothing to read
    kinds = {}
    for path, leaf in saved_at.items():
        place = places[path]
        # Stacks in unequal pieces, and other arrays that some processes have, are read by all and then moved.
        is_moved = isinstance(place, StackSharding) or (of_owners and path not in alone and not all_have_one([place]))
        place = spread_sharding(leaf.stored_shape) if is_moved else place
        kinds[path] = jax.ShapeDtypeStruct(leaf.stored_shape, leaf.stored_dtype, sharding=place)
    return kinds, {path: kind for path, kind in kinds.items() if path not in alone or is_here(kind.sharding)}


def _read_arrays(opened: Any, number: int, types: dict[str, Any], of_owners: bool) -> dict[str, Any]:
    """The arrays of some types; all of the checkpoint's, unless their owners alone read them."""
    ocp = orbax()
    if not of_owners:
        found = opened.restore(number, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(types)))
    else:
        chosen = ocp.checkpoint_utils.construct_restore_args(types)
        some = ocp.args.PyTreeRestore(item=types, restore_args=chosen, partial_restore=True)
        found = opened.restore(number, args=ocp.args.Composite(arrays=some))
    return dict(found["arrays"])


def saved_steps(directory: str | PathLike[str]) -> list[int]:
    """The steps of which a directory holds complete checkpoints, the newest last; none if there is no directory.

    Examples:
        >>> import tempfile, meshwright as mw
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     mw.save(directory, 10, {"epoch": 1})
        ...     mw.saved_steps(directory)
        [10]
    """
    orbax()
    wait_for_saves()
    if not full_path(directory).is_dir():
        return []
    with manager(directory, create=False) as opened:
        return sorted(opened.all_steps())


def _damaged(arrays: dict[str, Any], records: dict[str, SavedLeaf]) -> str:
    """Which arrays differ from the saved ones, in words."""
    damaged = [path for path, checksum in checksums(arrays).items() if checksum != records[path].checksum]
    return ", ".join(damaged[:3]) + (f" and {len(damaged) - 3} more" if len(damaged) > 3 else "")


def _check_like(like: Any) -> None:
    if isinstance(like, Parallelized) and like.last_plan is None:
        raise CheckpointError(
            f"{like.__name__} has no plan yet, so the shardings of its state are not known; first call "
            f"{like.__name__}.plan(…) with the types of its arguments, or mw.create_state"
        )


def _wanted(like: Any, version: int) -> tuple[list[Wanted], Any]:
    """The leaves of the state of `like`, named as in a version of checkpoints, and the state's structure."""
    escape = version > 1
    if not isinstance(like, Parallelized):
        return [_wanted_leaf(path, leaf) for path, leaf in named_leaves(like, escape)], tree_structure(like)
    plan = like.last_plan
    assert plan is not None
    places, children = like.state_places, plan.in_tree.children()
    starts = [0, *accumulate(child.num_leaves for child in children)]
    tree = children[places[0]] if len(places) == 1 else treedef_tuple([children[place] for place in places])
    leaves = [i for place in places for i in range(starts[place], starts[place + 1])]
    shardings = argument_shardings(plan)
    wanted = []
    for path, i in named_leaves(tree_unflatten(tree, leaves), escape):
        tensor = plan.arguments[i]
        if tensor.role == "static":
            wanted.append(Wanted(path, plan.in_leaves[i]))
        else:
            wanted.append(Wanted(path, None, tensor.dtype, tensor.shape, shardings[i]))
    return wanted, tree


def _wanted_leaf(path: str, leaf: Any) -> Wanted:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return Wanted(path, leaf)
    record = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return Wanted(path, None, str(record.dtype), tuple(record.shape), sharding)


def _read(note: Any, where: str) -> tuple[list[SavedLeaf], int]:
    """The list of leaves, and the version of the checkpoint."""
    if note["format"] != _FORMAT:
        raise ValueError(f"its format is {note['format']!r}")
    version = note["version"]
    if version not in (1, _VERSION):
        raise CheckpointError(
            f"{where} is of version {version!r} and this Meshwright reads versions 1 to {_VERSION}; restore it with "
            "the Meshwright that wrote it"
        )
    if version > 1 and note["checksum"] != _checksum(note["leaves"]):
        raise ValueError("its list of leaves does not have the checksum that was saved with it")
    leaves = [SavedLeaf(**(leaf | {"shape": tuple(leaf["shape"])})) for leaf in note["leaves"]]
    for leaf in checked(leaves, list[SavedLeaf], "leaves"):
        leaf.check()
    return leaves, version


def _checksum(noted: list[dict[str, Any]]) -> str:
    """The checksum of the list of leaves, which contains the Python numbers."""
    return hashlib.sha256(json.dumps(noted, sort_keys=True).encode()).hexdigest()


def _step(step: Any) -> int:
    try:
        number = index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise CheckpointError(f"step is {step!r}; give a whole number, 0 or more")
    return number


def _chosen(directory: str | PathLike[str], steps: list[int], step: int | None) -> int:
    if not steps:
        raise CheckpointError(
            f"{directory} holds no finished checkpoint; save one with mw.save(directory, step, state)"
        )
    if step is None:
        return steps[-1]
    number = _step(step)
    if number not in steps:
        raise CheckpointError(f"{directory} holds no checkpoint of step {number}; it holds {listed(steps)}")
    return number
