"""Phases: which operations are forward, backward and update, read off name scopes and dependencies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshwright.graph import BACKWARD, FORWARD, UPDATE, trace
from meshwright.graph.phases import PHASES, assign_phases


def op(scope, ins, outs):
    return scope, ins, outs


def phases_of(ops):
    scopes = list(dict.fromkeys(scope for scope, _, _ in ops))
    producer = {value: i for i, (_, _, outs) in enumerate(ops) for value in outs}
    makers = [producer.get(value, -1) for _, ins, _ in ops for value in ins]
    start = np.cumsum([0, *(len(ins) for _, ins, _ in ops)])
    scope = np.array([scopes.index(scope) for scope, _, _ in ops])
    return [PHASES[number] for number in assign_phases(scope, scopes, np.array(makers, np.int64), start)]


def test_without_a_gradient_everything_is_forward():
    assert phases_of([op("", [0], [1]), op("layer", [1], [2])]) == [FORWARD, FORWARD]


def test_scopes_name_forward_and_backward():
    ops = [op("jvp(f)", [0], [1]), op("transpose(jvp(f))", [1], [2])]
    assert phases_of(ops) == [FORWARD, BACKWARD]


def test_what_depends_on_backward_is_update_even_at_a_distance():
    ops = [op("jvp()", [0], [1]), op("transpose(jvp())", [1], [2]), op("", [2], [3]), op("", [3], [4])]
    assert phases_of(ops) == [FORWARD, BACKWARD, UPDATE, UPDATE]


def test_what_feeds_forward_work_is_forward():
    ops = [op("", [0], [1]), op("", [1], [2]), op("jvp()", [2], [3]), op("transpose(jvp())", [3], [4])]
    assert phases_of(ops) == [FORWARD, FORWARD, FORWARD, BACKWARD]


def test_what_reads_forward_results_is_forward():
    ops = [op("jvp()", [0], [1]), op("", [1], [2]), op("transpose(jvp())", [1], [3])]
    assert phases_of(ops) == [FORWARD, FORWARD, BACKWARD]


def test_work_on_state_alone_is_update():
    ops = [op("", [9], [8]), op("jvp()", [0], [1]), op("transpose(jvp())", [1], [2]), op("", [2, 8], [3])]
    assert phases_of(ops) == [UPDATE, FORWARD, BACKWARD, UPDATE]


def test_an_optax_step_with_clipping_has_the_norm_in_the_update():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    params = {"w": jnp.ones((4, 4))}
    opt_state = optimizer.init(params)

    def step(params, opt_state, x):
        value, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"])))(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    graph = trace(step, params, opt_state, jnp.ones((8, 4))).graph
    phase_of = {op.primitive: op.phase for op in graph.ops}
    assert phase_of["dot_general"] == BACKWARD  # the last product is the kernel's gradient
    assert phase_of["tanh"] == FORWARD
    assert phase_of["sqrt"] == UPDATE
    norm = [op for op in graph.ops if op.primitive == "reduce_sum" and op.phase == UPDATE]
    assert len(norm) == 1
