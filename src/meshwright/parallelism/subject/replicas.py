"""A stage's program on its whole mesh: the solution for one replica, with the batch split over the replicas' axis."""

from dataclasses import replace

import numpy as np

from meshwright.parallelism.axis_uses import AxisFacts
from meshwright.parallelism.dim_names import Among, major_loops
from meshwright.plans.records.traced_program import VIRTUAL, Ints, RecordedProgram
from meshwright.strategy.sharding import Axes


def lifted(facts: AxisFacts, replicas: int) -> RecordedProgram:
    """The program on two axes: the first splits every dim that comes from the data's first, the second as it did.

    Args:
        facts: Of the program of one replica, on the inner axis.
        replicas: The number of replicas; if it is 1, the first axis splits nothing.
    """
    program = facts.program
    batch = facts.classes.among(facts.batch if replicas > 1 else ())
    inner, sizes = facts.axes, (replicas, *facts.axes.sizes)
    code = Axes(sizes).pack(np.column_stack([batch.dims(), inner.unpack(program.code)]))
    loops = np.array([*program.assignments, (VIRTUAL,) * inner.num_axes], np.int64)[program.assignment]
    both = np.column_stack([_batch_loops(program, batch), loops])
    distinct, assignment = np.unique(both, axis=0, return_inverse=True)
    virtual = program.assignment == VIRTUAL
    return replace(
        program,
        code=code,
        assignments=list(map(tuple, distinct.tolist())),
        assignment=np.where(virtual, VIRTUAL, assignment.reshape(-1)),
    )


def _batch_loops(program: RecordedProgram, batch: Among) -> Ints:
    """For each operation the loop that runs over the batch; -1 for none."""
    loops = np.full(program.num_ops, -1)
    for number, nest in enumerate(program.nests):
        ops = np.flatnonzero(program.nest == number)
        tensors = [(program.reads[program.start[ops] + i], dims) for i, dims in enumerate(nest.operands)]
        tensors += [(program.first_made[ops] + i, dims) for i, dims in enumerate(nest.results)]
        for values, dims in tensors:
            for dim, loop in enumerate(major_loops(nest, dims)):
                if loop >= 0:
                    mine = batch.at(values, dim) & (loops[ops] < 0)
                    loops[ops[mine]] = loop
    return loops
