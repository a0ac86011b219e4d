"""Layers one after the other: what a checkpoint of ours waits for is the gradient that its layer begins with."""

import pytest

from meshwright import zoo
from meshwright.graph.tracing.trace import trace
from meshwright.runtime.microbatches.planned_parts import cut_traced, recomputing


@pytest.mark.parametrize("policy", ["selective", "full", "keep 0 1 2 9"])
def test_a_checkpoint_waits_for_no_gradient_of_a_weight(policy):
    # A checkpoint as written computes what its backward pass needs before it casts the arriving gradient; only then
    # the gradient meets a value of the layer. The weights of the head are those of the embedding, so their gradient
    # of the whole batch is read by the end of the backward pass as well.
    example = zoo.build("gemma-tiny", batch=8, layers=3, checkpoint="selective")
    traced = trace(example.train_step, example.state, example.batch)
    weights = {kind.shape for kind in traced.call.program.types[: len(traced.graph.state)] if len(kind.shape) > 1}
    changed = recomputing(traced, policy)
    program = changed.call.program
    checkpoints = [operation for operation in program.operations if operation.is_checkpoint]
    waited_for = {program.types[operation.inputs[-1]].shape for operation in checkpoints}
    assert waited_for and not weights.intersection(waited_for)
    assert cut_traced(changed, (1,), 4).graph.microbatches == 4
