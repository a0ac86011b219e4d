"""A state that notices when JAX hands it back from a step."""

import jax
import numpy as np


def state_that_calls(on_return):
    """A class of pytrees with one array of steps; `on_return` is called with their number on the way out of a step."""

    @jax.tree_util.register_pytree_node_class
    class State:
        def __init__(self, steps):
            self.steps = steps

        def tree_flatten(self):
            return (self.steps,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            if isinstance(children[0], jax.Array) and not isinstance(children[0], jax.core.Tracer):
                on_return(int(np.asarray(children[0])[0]))
            return cls(*children)

    return State
