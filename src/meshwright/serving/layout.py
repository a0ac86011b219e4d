"""Where a plan of serving puts parameters and cache: the degrees of a split, as shardings of everything that stays.

`Degrees` says what devices share, and `split.parts_of` into how many parts each product is cut; here it is said which
dims are cut. What a step computes in between follows from where its arguments are: the row of a slot is computed where
its keys and values lie, so that groups of a data degree attend to their own sequences, and tokens go to the experts.
"""

from collections.abc import Sequence
from math import gcd, prod
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from meshwright.errors import ServingError
from meshwright.planner.methods import Auto
from meshwright.serving.models import Decoder
from meshwright.serving.planning.split import Degrees

_Axes = tuple[str, ...]
_ROWS = ("embed", "head")  # cut by words, where these can be dealt evenly


def laid_out(split: Degrees, decoder: Decoder) -> Auto:
    """A method that fixes all parameters and the cache of a stage, and leaves a plan to say what follows from it.

    Args:
        split: The devices of a replica by what they share; a stage's are those of the tensor and the data degree.
        decoder: The layers of a stage, with the cache.
    """
    shared_heads = gcd(split.tensor, decoder.kv_heads)  # where there are fewer heads of keys, devices repeat these
    names, degrees = iter("xyz"), (split.data, shared_heads, split.tensor // shared_heads)
    data, keys, more = ((next(names),) if size > 1 else () for size in degrees)
    sizes = [size for size in degrees if size > 1]
    whole, tensor = (*data, *keys, *more), (*keys, *more)
    dealt = _dealt(whole, sizes, split.expert)
    params = _Params(tensor, keys, dealt, whole[len(dealt) :], split.tensor, decoder)
    fix = {f"params/{_path(path)}": params.spec(path, leaf) for path, leaf in tree_leaves_with_path(decoder.params())}
    cache = PartitionSpec(data or None, None, keys or None)
    fix |= {f"cache/{_path(path)}": cache for path, _ in tree_leaves_with_path(decoder.arrays())}
    return Auto(fix=fix, mesh_shapes=(tuple(sizes),))


class _Params:
    """Which dims of parameters are cut, by their names."""

    def __init__(self, tensor: _Axes, keys: _Axes, dealt: _Axes, shared: _Axes, degree: int, decoder: Decoder):
        self._degree, self._experts = degree, getattr(decoder.config, "experts", 0)
        columns = {"q": tensor, "k": keys, "v": keys}
        self._dims: dict[str, Sequence[_Axes]] = {name: ((), axes) for name, axes in columns.items()}
        self._dims |= {f"{name}_bias": (axes,) for name, axes in columns.items()}
        self._dims |= {"o": (tensor,), "sinks": (tensor,), "down": (tensor,)}
        for name in ("gate", "up"):
            self._dims |= {name: ((), tensor), f"{name}_bias": (tensor,)}
        if self._experts:
            for name in ("gate", "up"):
                self._dims |= {name: (dealt, (), shared), f"{name}_bias": (dealt, shared)}
            self._dims |= {"down": (dealt, shared), "down_bias": (dealt,)}
        self._dims |= dict.fromkeys(_ROWS, (tensor,))

    def spec(self, path: Sequence[Any], leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        name = str(getattr(path[-1], "key", path[-1]))
        if name in _ROWS and leaf.shape[0] % self._degree:
            return PartitionSpec()
        return PartitionSpec(*(axes or None for axes in self._dims.get(name, ())))


def _dealt(names: _Axes, sizes: Sequence[int], experts: int) -> _Axes:
    """The axes over which experts are dealt; those that are left share each of them."""
    for count in range(len(names) + 1):
        if prod(sizes[:count]) == experts:
            return names[:count]
    raise ServingError(
        f"the engine cannot deal experts to {experts} of {prod(sizes)} devices; plan with all of them, or with none"
    )


def _path(path: Sequence[Any]) -> str:
    return keystr(tuple(path), simple=True, separator="/")
