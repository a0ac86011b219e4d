"""Runs a script in two processes by `meshwright launch`, for tests of what one says of another."""

import os
import subprocess
import sys


def two_processes(folder, script, *options):
    """What both say on stderr, once both have printed that they are done."""
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "launch", "--processes", "2", *options, str(folder / "script.py")],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0 and sorted(done.stdout.split()) == ["[0]", "[1]", "done", "done"], done
    return done.stderr
