"""The exceptions a user can meet: each message says what was wrong, with which value, and what to do."""

from meshwright.names import printable


class MeshwrightError(Exception):
    """Base of every error that Meshwright raises for a user's input.

    Messages quote names, which may hold any character: as text, a message is fit for a terminal.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class ClusterError(MeshwrightError, ValueError):
    """A cluster, chip or mesh description that cannot be used."""


class TraceError(MeshwrightError, ValueError):
    """A function that JAX could not trace with the given arguments."""


class ShardingError(MeshwrightError, ValueError):
    """A requested sharding that the shapes or the mesh do not allow, or a path that matches nothing."""


class ProblemError(MeshwrightError, ValueError):
    """A malformed choice problem; the message names the element at fault."""


class PlanFileError(MeshwrightError, ValueError):
    """A plan file that cannot be read: damaged, or of another version."""


class RuleError(MeshwrightError, ValueError):
    """A rule that does not describe the operation it was given for."""


class SimulationError(MeshwrightError, ValueError):
    """A plan that cannot be simulated as asked."""


class DoesNotFit(MeshwrightError):
    """No plan fits the memory of the devices.

    Attributes:
        needed_bytes: The least memory per device for which a plan was found; a plan that needs less may exist.
        limit_bytes: The memory per device that was allowed.
        microbatches: A number of microbatches, and about what a device would need with it: the fewest that would fit,
            or else as many as the batch has rows for. None where no number helps.
    """

    def __init__(
        self, message: str, *, needed_bytes: int, limit_bytes: int, microbatches: tuple[int, int] | None = None
    ):
        super().__init__(message)
        self.microbatches = microbatches
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


class OutputError(MeshwrightError, OSError):
    """A file or folder that cannot be written."""


class TrainingError(MeshwrightError, ValueError):
    """A training run that cannot begin or continue as its settings say; the message names the setting or the file."""


class ServingError(MeshwrightError, ValueError):
    """A request, load, promise or model that cannot be served as asked; the message says what would do."""


class CheckpointError(MeshwrightError, RuntimeError):
    """A state that could not be saved or restored; what was saved earlier is intact."""


class DeviceOutOfMemory(MeshwrightError, RuntimeError):
    """A device ran out of memory while a program ran."""


class ProcessError(MeshwrightError, RuntimeError):
    """Another process of the program did not come, ended, or does something else than this one."""


def raised_at(error: BaseException) -> str:
    """``file:line`` of the user's own code that an error came from; empty where there is none.

    That is the innermost frame that is neither in Meshwright (but for its example models), nor in an installed
    package, nor in Python's own library; where all do, the innermost that is not in Meshwright or JAX.
    """
    import sys  # here, since these are needed only where something went wrong
    import sysconfig
    import traceback
    from pathlib import Path

    ours = [str(path) for path in Path(__file__).parent.iterdir() if path.name != "zoo"]
    ours += [str(Path(sys.modules[name].__file__ or "").parent) for name in ("jax", "jaxlib") if name in sys.modules]
    installed = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    near = [frame for frame in frames if not frame.filename.startswith(tuple(ours))]
    users_frames = [frame for frame in near if not frame.filename.startswith(tuple(installed))]
    innermost = (users_frames or near)[-1:]
    return f"{innermost[0].filename}:{innermost[0].lineno}" if innermost else ""
