"""Operations that each device does by itself on its own parts: left to XLA, they would gather what they read."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh as DeviceMesh

from meshwright import jax_compat
from meshwright.planner.plan import OpPlan, partition_spec
from meshwright.planner.tensor import Spec

# XLA's partitioner cannot split these along their batch dims, which is all that their rules let be split.
_UNKNOWN_TO_XLA = frozenset(("fft", "top_k"))


def is_done_alone(eqn: Any, op: OpPlan) -> bool:
    """Whether XLA would gather what an operation reads in parts."""
    return eqn.primitive.name in _UNKNOWN_TO_XLA and any(any(spec) for spec in op.operands if spec is not None)


def do_alone(eqn: Any, op: OpPlan, mesh: DeviceMesh, operands: Sequence[Any]) -> list[Any]:
    """The results of an operation that reads and makes its arrays as the plan says."""
    function = jax.shard_map(
        lambda *xs: tuple(jax_compat.bind(eqn, xs)),
        mesh=mesh,
        in_specs=_specs(op.operands),
        out_specs=_specs(op.results),
        check_vma=False,
    )
    return list(function(*operands))


def _specs(specs: Sequence[Spec | None]) -> tuple[Any, ...]:
    return tuple(partition_spec(spec or ()) for spec in specs)
