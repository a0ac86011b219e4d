"""Plain single-device models with published shapes, for demos, tests and benchmarks.

Each family is one file of ordinary JAX (`llama.py`, `gpt.py`, ...) and one file of shapes (`shapes/llama.toml`, ...).

>>> from meshwright import zoo
>>> example = zoo.build("llama2-13b", batch=200, seq=2048)
>>> example.state["params"]["layers"][3]["up"].shape
(5120, 13824)
"""

from meshwright.zoo.catalogue import Entry, ZooError, entry, names
from meshwright.zoo.example import Example, build

__all__ = ["Entry", "Example", "ZooError", "build", "entry", "names"]
