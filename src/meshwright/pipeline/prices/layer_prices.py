"""What is known of every layer on one view: seconds and bytes, item by item."""

from dataclasses import dataclass
from enum import IntEnum, auto

from meshwright.pipeline.layers.forward_pass import Array
from meshwright.plans.tensor import Spec


class Item(IntEnum):
    """What is known of a layer on one view: seconds of one microbatch or step, and bytes on one device."""

    FORWARD = 0  # compute
    FORWARD_SENT = auto()  # communication
    BACKWARD = auto()  # compute; with what the user's own checkpoints repeat
    BACKWARD_SENT = auto()
    WEIGHTS = auto()  # the part of BACKWARD that makes weights' gradients
    FORWARD_PRODUCTS = auto()  # the part of FORWARD in matrix products
    BACKWARD_PRODUCTS = auto()
    REPEATED = auto()  # the part of BACKWARD that repeats forward work
    REPEATED_SENT = auto()
    AGAIN = auto()  # the part of FORWARD that selective recomputation repeats
    AGAIN_PRODUCTS = auto()
    AGAIN_SENT = auto()
    GRADIENTS_SENT = auto()  # bringing gradients together inside the view, once a step
    UPDATE = auto()
    UPDATE_SENT = auto()
    PARAMETER_BYTES = auto()
    READ_BYTES = auto()  # the same and, of parameters that belong to another layer, those that are read here
    GRADIENT_BYTES = auto()  # of the parameters; none where no gradient is taken
    OPTIMIZER_BYTES = auto()
    COPY_BYTES = auto()  # of parameters in another type
    HELD_BYTES = auto()  # for the backward pass of one microbatch
    KEPT_BYTES = auto()  # the part of these that selective recomputation keeps
    INPUT_BYTES = auto()  # what comes over the cut before the layer
    TRANSIENT_BYTES = auto()  # at the most while it works on one microbatch


ALL_SECONDS = [  # the parts of no other item: together, the time of a step
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

    items: Array
    batch_parts: int
    specs: dict[int, Spec]
    local_bytes: dict[int, float]
