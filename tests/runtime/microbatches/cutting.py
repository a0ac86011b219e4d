"""A function with its batch cut into parts, to be called like the function itself."""

from meshwright.graph.tracing.call import call_abstractly
from meshwright.runtime.microbatches.microbatches import in_microbatches


def in_parts(function, args, batch, count):
    """The function for arguments like these, its batch (the arguments at these positions) cut into `count` parts."""
    call = call_abstractly(function, args)
    program = in_microbatches(call, batch, count).program
    return lambda *given: call.results.fill(program.run(call.arguments.pick(given)))
