"""Where the figures of a run go: the terminal, JSON lines, TensorBoard, Weights & Biases, and any function."""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from meshwright.errors import TrainingError
from meshwright.output import write_whole
from meshwright.trainer.event_file import EventFile
from meshwright.trainer.settings import Settings
from meshwright.units import format_bytes, format_seconds

Figures = Mapping[str, float]
Sink = Callable[[int, Figures], None]
METRICS = "metrics.jsonl"


def make_sinks(settings: Settings, start: int) -> list[Sink]:
    """The sinks that the settings name.

    Args:
        settings: Of the run.
        start: The step that the run continues from; lines about later ones are dropped, since these run again.
    """
    found: list[Sink] = [to_terminal]
    if settings.folder is not None:
        found.append(_to_lines(Path(settings.folder) / METRICS, start))
    if settings.log.tensorboard is not None:
        found.append(_to_tensorboard(settings.log.tensorboard))
    if settings.log.wandb is not None:
        found.append(_to_wandb(settings, settings.log.wandb))
    return found


def to_terminal(step: int, figures: Figures) -> None:
    """Prints one line."""
    parts = [_SHOWN[name](value) for name, value in figures.items() if name in _SHOWN]
    others = [f"{name} {value:.5g}" for name, value in figures.items() if name not in (*_SHOWN, *_UNSHOWN)]
    lost = figures.get("input_s", 0.0) + figures.get("checkpoint_s", 0.0)
    if lost > 0.01 * figures.get("step_s", 0.0):
        parts.append(f"{format_seconds(lost)} lost to input and checkpoints")
    print(f"step {step}: {', '.join([*parts, *others])}", file=sys.stdout, flush=True)


_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.5f}",
    "held_out_loss": lambda value: f"held-out loss {value:.5f}",
    "grad_norm": lambda value: f"gradient norm {value:.3g}",
    "learning_rate": lambda value: f"rate {value:.3g}",
    "step_s": lambda value: f"{format_seconds(value)} a step",
    "tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
    "mfu": lambda value: f"MFU {value:.1%}",
    "peak_bytes": lambda value: f"{format_bytes(value)} at most",
}
_UNSHOWN = ("planned_step_s", "input_s", "checkpoint_s", "log_s")


def _to_lines(path: Path, start: int) -> Sink:
    """One JSON object a line; what an earlier run wrote about steps up to `start` stays."""
    kept = [line for line in _lines(path) if _is_up_to(line, start)]
    write_whole(path, "".join(f"{line}\n" for line in kept))

    def write(step: int, figures: Figures) -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **figures}) + "\n")
        except OSError as error:
            raise TrainingError(f"{path} cannot be written: {error.strerror}") from None

    return write


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _is_up_to(line: str, start: int) -> bool:
    """Whether a line is complete, and about a step that does not run again."""
    try:
        return int(json.loads(line)["step"]) <= start
    except (ValueError, KeyError, TypeError):  # the last line of a run that was killed may be half a line
        return False


def _to_tensorboard(folder: str) -> Sink:
    try:
        events = EventFile(Path(folder).expanduser())
    except OSError as error:
        raise TrainingError(f"log.tensorboard is {folder}, which cannot be written: {error.strerror}") from None

    def write(step: int, figures: Figures) -> None:
        try:
            events.write(step, figures)
        except OSError as error:
            raise TrainingError(f"{folder} cannot be written: {error.strerror}") from None

    return write


def _to_wandb(settings: Settings, project: str) -> Sink:
    try:
        import wandb
    except ImportError:
        raise TrainingError("log.wandb needs wandb, which is not installed: pip install wandb") from None
    # A run that continues in its folder is the same one there, too.
    folder = settings.folder and str(Path(settings.folder).expanduser().absolute())
    name = hashlib.sha256(folder.encode()).hexdigest()[:16] if folder else None
    run = wandb.init(project=project, config=asdict(settings), id=name, resume="allow" if name else None)

    def write(step: int, figures: Figures) -> None:
        run.log(dict(figures), step=step)

    return write
