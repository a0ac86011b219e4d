"""Runs a process that prints one line of JSON for each thing it tries, and kills it where it hangs."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from threading import Timer
from typing import Any


def told(command: list[str], hangs_s: float, env: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """What a process tells, line by line; it is killed once it has told nothing for `hangs_s` seconds.

    The lines end early where the process ends early, whatever ended it: the caller counts them.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as process:
        assert process.stdout is not None
        watch = _watched(process, hangs_s)
        for line in process.stdout:
            watch.cancel()
            yield json.loads(line)
            watch = _watched(process, hangs_s)
        watch.cancel()


def _watched(process: subprocess.Popen[str], hangs_s: float) -> Timer:
    watch = Timer(hangs_s, process.kill)
    watch.start()
    return watch
