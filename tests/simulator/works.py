"""Small works with known answers."""

from meshwright.simulator.work import COMPUTE, Chunk, Task, Work


def compute(seconds, name="work"):
    return (Task(name, COMPUTE, "compute", seconds),)


def pipeline(stages, microbatches, schedule, interleave=1, forward=1.0, backward=2.0, send_s=0.0, **options):
    """Equal stages; a stage's chunks share its work."""
    chunk = Chunk(
        forward=compute(forward / interleave, "forward"),
        backward=compute(backward / interleave, "backward"),
        closing=compute(backward / interleave, "backward"),
        inputs=compute(backward / 2, "inputs"),
        weights=compute(backward / 2, "weights"),
        closing_weights=compute(backward / 2, "weights"),
        send_s=send_s,
        activation_bytes=8.0,
        working_bytes=1.0,
    )
    settings = {
        "name": "test",
        "chunks": (chunk,) * (stages * interleave),
        "num_stages": stages,
        "num_microbatches": microbatches,
        "schedule": schedule,
        "update": ((),) * stages,
        "state_bytes": (100.0,) * stages,
        "devices": (4,) * stages,
        "limit_bytes": (1000.0,) * stages,
        "peak_flops": 1e12,
        "model_flops": 1e12,
        "tokens": 64.0,
    }
    return Work(**(settings | options))
