"""The software that runs a plan: XLA unless another is named, so that plans can be held against published steps."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Software:
    """How a framework runs the operations of a plan.

    Attributes:
        attention: The fused attention kernel, a name of `cost/attention.toml`; empty for the one that JAX calls.
        separate: How much longer operations of layers other than products take, because they are not fused.
        gradients: Size of gradients as they are exchanged, relative to the plan's.
        message_bytes: Parameters and gradients are exchanged in messages of this size where they are smaller.
        overlap: Whether parameters and gradients are exchanged beside compute.
        fixed_s: Time of a step that no operation explains.
    """

    attention: str = ""
    separate: float = 1.0
    gradients: float = 1.0
    message_bytes: float = 2.0**25  # about what XLA's combiners aim at by default
    overlap: bool = True
    fixed_s: float = 0.0


XLA = Software()

#: XLA's CPU backend has no asynchronous collectives: compute waits for every one.
XLA_CPU = Software(overlap=False)
