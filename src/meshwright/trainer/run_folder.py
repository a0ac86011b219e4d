"""The folder of a run: its checkpoints, plans and tokens, and a note of what its steps depend on."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import OutputError, TrainingError
from meshwright.output import write_whole
from meshwright.trainer.settings import Settings
from meshwright.trainer.tokens import Tokens
from meshwright.training.saving.checkpoints import saved_steps

_FORMAT = "meshwright-run"


@dataclass(frozen=True)
class RunFolder:
    """The places in a run's folder."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def plans(self) -> Path:
        return self.path / "plans"

    @property
    def tokens(self) -> Path:
        return self.path / "tokens"

    @property
    def note(self) -> Path:
        return self.path / "run.json"

    def make(self) -> None:
        """Makes the folder.

        Raises:
            TrainingError: It cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainingError(f"the folder {self.path} cannot be made: {error.strerror}; choose another") from None

    def check(self, settings: Settings, tokens: Tokens) -> None:
        """Notes on what the steps of a run depend on, and refuses to continue one that had other data.

        The checkpoint has the number of the step, which together with these gives the next batch. A run that has none
        begins anew.

        Raises:
            TrainingError: The run in this folder began with another model or data, or with other batches.
        """
        wanted: dict[str, Any] = {
            "model": settings.model or Path(settings.path or "").resolve().name,
            "data": tokens.fingerprint,
            "seq": settings.seq,
            "batch_tokens": settings.batch_tokens,
            "seed": settings.seed,
        }
        before = self._read()
        if before is None or not saved_steps(self.checkpoints):
            if jax.process_index() == 0:
                self._write({"format": _FORMAT, **wanted})
            return
        for name, value in wanted.items():
            if before.get(name) != value:
                what = "other data" if name == "data" else f"{name} = {before.get(name)}, not {value}"
                raise TrainingError(
                    f"the run in {self.path} began with {what}, so it cannot continue with the same model and batches; "
                    "restore that, or choose another folder"
                )

    def _read(self) -> dict[str, Any] | None:
        with suppress(FileNotFoundError):
            try:
                found = json.loads(self.note.read_text(encoding="utf-8"))
                if found["format"] == _FORMAT:
                    return dict(found)
            except (ValueError, KeyError, TypeError):
                pass
            raise TrainingError(f"{self.note} was not written by a training run; choose another folder")
        return None

    def _write(self, note: dict[str, Any]) -> None:
        try:
            write_whole(self.note, json.dumps(note, indent=1) + "\n")
        except OutputError as error:
            raise TrainingError(str(error)) from None
