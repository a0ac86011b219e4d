"""The folder of a checkpoint and the JSON in it, read without JAX."""

import json
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError

CONFIG = "config.json"


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON file that holds a dictionary; `what` says what a folder without it lacks."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}, so it is no {what}; give the folder of one") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; check its permissions") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__} and no dictionary; download it again")
    return found


def folder_of(path: Any) -> Path:
    """The folder of a checkpoint."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        other = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"{path} {other}; give the folder that holds {CONFIG} and the safetensors files")
    return folder
