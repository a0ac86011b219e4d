"""The prices of every layer on one view: seconds and bytes, item by item."""

from dataclasses import dataclass
from enum import IntEnum, auto

from meshwright.arrays import Floats
from meshwright.plans.tensor import Spec


class Item(IntEnum):
    """An item of a layer's price on one view: seconds of one microbatch or step, or bytes on one device."""

    FORWARD = 0  # compute
    FORWARD_SENT = auto()  # communication
    BACKWARD = auto()  # compute, including recomputation by the user's own checkpoints
    BACKWARD_SENT = auto()
    WEIGHTS = auto()  # the part of BACKWARD that computes gradients of weights
    FORWARD_PRODUCTS = auto()  # the part of FORWARD in matrix products
    BACKWARD_PRODUCTS = auto()
    REPEATED = auto()  # the part of BACKWARD that repeats forward work
    REPEATED_SENT = auto()
    AGAIN = auto()  # the part of FORWARD that selective recomputation repeats
    AGAIN_PRODUCTS = auto()
    AGAIN_SENT = auto()
    GRADIENTS_SENT = auto()  # reductions of gradients inside the view, once a step
    UPDATE = auto()
    UPDATE_SENT = auto()
    PARAMETER_BYTES = auto()
    READ_BYTES = auto()  # the same, plus parameters of other layers that this layer reads
    GRADIENT_BYTES = auto()  # gradients of the parameters; 0 where no gradient is taken
    OPTIMIZER_BYTES = auto()
    COPY_BYTES = auto()  # copies of parameters in another data type
    HELD_BYTES = auto()  # for the backward pass of one microbatch
    KEPT_BYTES = auto()  # the part of these that selective recomputation keeps
    INPUT_BYTES = auto()  # activations that cross the cut before the layer, as far as they are held
    CROSSING_BYTES = auto()  # activations that cross that cut
    DATA_BYTES = auto()  # the rows of the batch that one microbatch reads, which are there from the start of a step
    TRANSIENT_BYTES = auto()  # the peak of temporaries while it runs on one microbatch


ALL_SECONDS = [  # items that are not part of another: their sum is the time of a step
    Item.FORWARD,
    Item.FORWARD_SENT,
    Item.BACKWARD,
    Item.BACKWARD_SENT,
    Item.GRADIENTS_SENT,
    Item.UPDATE,
    Item.UPDATE_SENT,
]


@dataclass(frozen=True)
class LayerPrices:
    """All layers on one view under one choice.

    Attributes:
        items: `Item`s by rows, layers by columns.
        batch_parts: Into how many parts the view splits the rows.
        specs: Sharding of each argument that is state, by value id.
        local_bytes: Bytes of each of them on one device.
    """

    items: Floats
    batch_parts: int
    specs: dict[int, Spec]
    local_bytes: dict[int, float]
