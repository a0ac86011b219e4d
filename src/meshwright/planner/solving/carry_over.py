"""A choice on one mesh view as a choice on another whose axes make up those of the first, to start from.

What splits a tensor over 50 hosts splits it over 2×25 of them, too, and over 25×2: most of what one view was solved for
need not be found again on the next.
"""

from itertools import product
from math import prod

import numpy as np

from meshwright.arrays import Ints
from meshwright.planner.pricing.formulation import Formulation
from meshwright.strategy.sharding import Axes, Codes


def translated(choice: Ints, source: Formulation, target: Formulation) -> Ints | None:
    """The choice of the target that splits everything as a choice of the source does, as far as it can.

    Both are problems of one folded graph. None where the target's axes do not make up the source's.
    """
    parts = made_up(source.axes.sizes, target.axes.sizes)
    if parts is None:
        return None
    found, known = [], {}
    for node, strategy in enumerate(choice.tolist()):
        key = (source.folded.alike[node], strategy) if node < source.num_groups else (-1 - node, strategy)
        if key not in known:
            wanted = _moved(_shardings(source, node)[:, strategy], source.axes, target.axes, parts)
            alike = (_shardings(target, node) == wanted[:, None]).sum(axis=0)
            known[key] = int(np.argmin(np.where(alike == alike.max(), target.costs[node], np.inf)))
        found.append(known[key])
    return np.array(found, np.int64)


def made_up(sizes: tuple[int, ...], finer: tuple[int, ...]) -> tuple[int, ...] | None:
    """For each of some axes the one of others that it is a part of; None where these are not made up of them.

    >>> made_up((50, 4), (2, 25, 4)), made_up((25, 2, 4), (2, 25, 4)), made_up((2, 25, 4), (50, 4))
    ((0, 0, 1), (1, 0, 2), None)
    """
    for parts in product(range(len(sizes)), repeat=len(finer)):
        if all(prod(n for n, of in zip(finer, parts, strict=True) if of == axis) == n for axis, n in enumerate(sizes)):
            return parts
    return None


def _shardings(formulation: Formulation, node: int) -> Codes:
    """How all that a node makes and needs is split, by its strategies."""
    if node >= formulation.num_groups:
        return formulation.shared_codes[node - formulation.num_groups][None]
    table = formulation.tables[node]
    codes = [*table.codes, *table.needs]
    return np.stack(codes) if codes else np.zeros((0, len(formulation.costs[node])), np.int64)


def _moved(codes: Codes, source: Axes, target: Axes, parts: tuple[int, ...]) -> Codes:
    """Shardings of the source's axes as those of the target's."""
    held = source.unpack(codes)[..., list(parts)]
    return target.pack(np.where(np.array(target.sizes) > 1, held, -1))  # axes of one device split nothing
