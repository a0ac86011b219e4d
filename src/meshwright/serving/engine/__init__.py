"""The engine: requests in, tokens out, with one step on the device ahead of the host.

`buckets.py` cuts a planned step into calls of compiled shapes, `programs.py` compiles and runs them, `engine.py` is the
loop.
"""

from meshwright.serving.engine.engine import Engine
from meshwright.serving.engine.fleet import Fleet
from meshwright.serving.engine.placement import Placement

__all__ = ["Engine", "Fleet", "Placement"]
