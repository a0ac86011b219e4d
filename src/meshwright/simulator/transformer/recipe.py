"""A recipe: how experts split and train a transformer, as they publish it."""

from dataclasses import dataclass

from meshwright.hardware import Cluster
from meshwright.simulator.transformer.recompute import Recompute
from meshwright.simulator.transformer.shape import Shape


@dataclass(frozen=True, slots=True)
class Stack:
    """The properties of the software that ran a recipe.

    Attributes:
        name: A word for people.
        attention: ``"materialised"`` or a fused kernel of `cost/attention.toml`.
        fused: Whether elementwise operations are fused into few kernels.
        fused_softmax: Whether materialised attention has a kernel of its own for mask and softmax.
        loss: ``"fused"`` (logits are kept in 16 bits), ``"in place"`` (in single precision, once) or ``"separate"``.
        metrics: How many metrics are computed from the logits in every step, beside the loss.
        dropout: Whether the model was trained with dropout.
        sequence_parallel: Whether tensor-parallel devices split the sequence outside of products.
        async_tensor: Whether tensor-parallel exchanges are cut up and run beside the products that they feed.
        sums_beside_weights: Whether the backward pass sums up inputs' gradients beside the weights' gradients.
        overlap: Whether gradients and parameters are exchanged beside compute.
        messages: The number of messages in which ZeRO-3 exchanges a layer.
        xla: Whether one program is the whole step; it fetches matrix by matrix rather than layer by layer.
        repeats_last: Whether full recomputation repeats a layer's last product, too.
        fused_accumulation: Whether a product adds to the gradients of earlier microbatches itself.
        weight_bytes: Bytes of each parameter as it is kept.
        gradient_bytes: Bytes of each gradient as it is kept.
        optimizer_bytes: Bytes of optimizer state per parameter, master copy included.
        reduce_bytes: Bytes of each gradient as it is exchanged.
        remark: What makes its step times hard to predict, if anything does.
    """

    name: str
    attention: str
    fused: bool = True
    fused_softmax: bool = True
    loss: str = "separate"
    metrics: int = 0
    dropout: bool = False
    sequence_parallel: bool = True
    async_tensor: bool = False
    sums_beside_weights: bool = False
    overlap: bool = True
    messages: int = 1
    xla: bool = False
    repeats_last: bool = False
    fused_accumulation: bool = False
    weight_bytes: float = 2
    gradient_bytes: float = 4
    optimizer_bytes: float = 12
    reduce_bytes: float = 4
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the time and the memory of a step.

    Attributes:
        shape: The model.
        cluster: The machines.
        data, tensor, pipeline, context, expert: Degrees of parallelism; experts are spread over data-parallel devices.
        zero: The ZeRO stage.
        shard: The number of data-parallel devices over which ZeRO shards; the others hold copies.
        microbatch: Sequences in one microbatch of one data-parallel device.
        num_microbatches: Microbatches of a step.
        interleave: Chunks of layers per stage.
        schedule: The pipeline's schedule.
        dtype: Type of the layers' products, e.g. ``"bfloat16"`` or ``"float8_e4m3fn"``.
        by_row: Whether 8-bit products have a scale for each row; such kernels reached the rate of 16-bit ones only.
        recompute: The recomputation in the backward pass.
        stack: The software.
    """

    shape: Shape
    cluster: Cluster
    stack: Stack
    recompute: Recompute
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 0
    shard: int = 1
    microbatch: float = 1
    num_microbatches: int = 1
    interleave: int = 1
    schedule: str = "1f1b"
    dtype: str = "bfloat16"
    by_row: bool = False

    @property
    def tokens(self) -> float:
        """Tokens of one microbatch on one device."""
        return self.microbatch * self.shape.seq / self.context

    @property
    def layer_params(self) -> float:
        """Parameters of a layer that belong to one of the devices that experts are spread over."""
        s = self.shape
        return s.layer_params - s.experts * s.expert_params * (1 - 1 / self.expert)

    @property
    def step_tokens(self) -> float:
        return float(self.data * self.microbatch * self.num_microbatches * self.shape.seq)

    @property
    def spread_tokens(self) -> float:
        """Tokens of one microbatch on one device outside of tensor-parallel products."""
        return self.tokens / (self.tensor if self.stack.sequence_parallel else 1)
