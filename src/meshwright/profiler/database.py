"""Keeps surveys in the user's cache directory: one JSON file for each machine."""

import hashlib
import json
import logging
import os
import re
import tempfile
from dataclasses import astuple
from pathlib import Path

from meshwright.names import printable
from meshwright.profiler.survey import Machine, Survey
from meshwright.schema import parse_json

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """``$MESHWRIGHT_CACHE``, else ``meshwright`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    folder = os.environ.get("MESHWRIGHT_CACHE")
    if folder:
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "meshwright"


def survey_path(folder: Path, machine: Machine) -> Path:
    """The file of a machine's survey; its name identifies the machine."""
    digest = hashlib.sha256(repr(astuple(machine)).encode()).hexdigest()[:12]
    shape = f"{machine.num_processes}x{machine.devices_per_process}"
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", f"{machine.host}-{machine.device_kind}-{shape}")
    return folder / f"machine-{readable[:80]}-{digest}.json"


def load_survey(folder: Path, machine: Machine) -> Survey | None:
    """The survey of a machine; None where there is none, or none that can be used."""
    path = survey_path(folder, machine)
    try:
        survey = Survey.from_json(parse_json(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s cannot be used (%s): the machine is measured again", path, printable(str(error)))
        return None
    if survey.machine != machine:
        log.warning("%s is of another machine: this one is measured again", path)
        return None
    return survey


def save_survey(folder: Path, survey: Survey) -> Path | None:
    """Saves a survey atomically; returns None if the folder cannot be written, which is not an error."""
    path = survey_path(folder, survey.machine)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(survey.to_json(), file, indent=1)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        log.warning("the measurements of this machine cannot be kept in %s (%s)", folder, error)
        return None
    return path
