"""Loops whose condition was batched, as loops that go on while any of their conditions holds.

`jax.vmap` of a `lax.while_loop` whose condition depends on the examples makes one loop with a condition for each
example, which only JAX's lowering understands: the loop goes on while any holds, and an example whose condition does
not hold keeps its values. The program is changed to say so itself before anything else sees it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from meshwright import jax_compat
from meshwright.graph.tracing.bodies import bodies_of, with_bodies


def with_single_conditions(closed: Any) -> jax_compat.ClosedJaxpr:
    """The program, a closed jaxpr, with one condition for each loop; the same object where all have one already."""
    return _rewritten(closed, {})


def _rewritten(closed: Any, memory: dict[int, Any]) -> Any:
    """A closed or open jaxpr rewritten; functions that are called repeatedly stay one jaxpr."""
    jaxpr = jax_compat.close(closed).jaxpr
    if id(jaxpr) not in memory:
        eqns = [_equation(eqn, memory) for eqn in jaxpr.eqns]
        same = all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
        memory[id(jaxpr)] = (jaxpr if same else jaxpr.replace(eqns=eqns)), jaxpr  # which keeps its id from being reused
    new, _ = memory[id(jaxpr)]
    if new is jaxpr:
        return closed
    return new if closed is jaxpr else closed.replace(jaxpr=new)


def _equation(eqn: Any, memory: dict[int, Any]) -> jax_compat.Equation:
    if not bodies_of(eqn):
        return eqn
    eqn = with_bodies(eqn, lambda inner: _rewritten(inner, memory))
    is_batched = eqn.primitive.name == "while" and jax_compat.close(eqn.params["cond_jaxpr"]).out_avals[0].shape
    return _with_single_condition(eqn) if is_batched else eqn


def _with_single_condition(eqn: Any) -> jax_compat.Equation:
    """A loop that computes the same; its body also reads what its conditions read."""
    params = eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    condition, body = (jax_compat.close(params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    hold, advance = jaxpr_as_fun(condition), jaxpr_as_fun(body)

    def any_holds(*values: Any) -> jax.Array:
        (holds,) = hold(*values)
        return lax.reduce_or(holds, range(holds.ndim))

    def step(*values: Any) -> list[Any]:
        of_condition, of_body = values[:num_cond], values[num_cond : num_cond + num_body]
        carry = values[num_cond + num_body :]
        (holds,) = hold(*of_condition, *carry)
        advanced = advance(*of_body, *carry)
        return [_where(holds, new, old) for new, old in zip(advanced, carry, strict=True)]

    return eqn.replace(
        invars=[*eqn.invars[:num_cond], *eqn.invars],
        params={
            **params,
            "cond_jaxpr": _traced(any_holds, condition.in_avals),
            "body_jaxpr": _traced(step, [*condition.in_avals[:num_cond], *body.in_avals]),
            "body_nconsts": num_cond + num_body,
        },
    )


def _where(holds: Any, new: Any, old: Any) -> jax.Array:
    """An example's new value where its condition holds; conditions are of the leading dims."""
    return lax.select(lax.broadcast_in_dim(holds, new.shape, range(holds.ndim)), new, old)


def _traced(function: Callable[..., Any], types: Sequence[Any]) -> jax_compat.ClosedJaxpr:
    return jax_compat.trace(function, types)
