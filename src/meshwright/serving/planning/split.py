"""How one replica of a model is spread over devices, in which types it is stored, and what that takes of memory."""

from dataclasses import dataclass
from math import ceil

from meshwright.errors import ServingError
from meshwright.serving.planning.decoder_work import DecoderWork, Product

#: Bytes of a number by type; types of 4 bits have a scale of 8 bits for every 32 numbers.
BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float8": 1.0,
    "int8": 1.0,
    "int4": 0.53125,
    "float4": 0.53125,
}
#: Types in which products are computed, where it is not the weights': of 4 bits only the weights are stored.
COMPUTED = {"float8": "float8_e4m3fn", "int4": "bfloat16", "float4": "bfloat16"}
#: Bytes of a vector's scale.
_SCALE = 4.0
#: Part of a device's memory that weights and cache may fill; the rest is for activations and the runtime (vLLM's own
#: default, `gpu_memory_utilization`).
USABLE = 0.9


@dataclass(frozen=True)
class Storage:
    """The types that numbers are stored in.

    Attributes:
        weights: Of the products with weights. Embeddings and the head stay in half precision where these are smaller;
            of a model with experts, types of 4 bits are the experts' alone.
        cache: Of keys and values.
        scaled: Whether each vector of a cache of 8 bits has a scale, as in this package's engine.
    """

    weights: str = "bfloat16"
    cache: str = "bfloat16"
    scaled: bool = False

    def __post_init__(self) -> None:
        for name in ("weights", "cache"):
            if getattr(self, name) not in BYTES:
                raise ServingError(f"{name} is {getattr(self, name)!r}; give one of {', '.join(BYTES)}")

    def dtype_of(self, product: Product, work: DecoderWork) -> str:
        """The type in which a product's weights are stored."""
        small = BYTES[self.weights] < 2
        if small and (product is work.head or (BYTES[self.weights] < 1 and work.num_experts and not product.experts)):
            return "bfloat16"
        return self.weights


@dataclass(frozen=True, order=True)
class Degrees:
    """The devices of one replica, by what they share.

    Attributes:
        tensor: Devices that share each product and each layer's heads.
        pipeline: Stages of consecutive layers.
        data: Groups that each attend to sequences of their own; only where there are experts, which all groups share.
        expert: Devices over which the experts are dealt; the others of ``tensor × data`` share each expert.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline * self.data

    def problem(self, work: DecoderWork) -> str:
        """Why a model cannot be split so; empty where it can."""
        for a in work.attention:
            if a.heads % self.tensor:
                return f"{a.heads} heads cannot be spread over {self.tensor} devices"
            if a.kv_heads % self.tensor and self.tensor % a.kv_heads:
                return f"{a.kv_heads} heads of keys can be neither dealt to {self.tensor} devices nor repeated evenly"
        if self.pipeline > work.layers:
            return f"{work.layers} layers cannot be cut into {self.pipeline} stages"
        if (self.data > 1 or self.expert > 1) and not work.num_experts:
            return "there are no experts to share"
        if (self.tensor * self.data) % self.expert or work.num_experts % self.expert:
            return f"{work.num_experts} experts cannot be dealt to {self.expert} of {self.tensor * self.data} devices"
        for product in work.products:
            parts = self.tensor * self.data // self.expert if product.experts else self.tensor
            if product.name in ("gate", "up") and product.columns % parts:
                return f"{product.columns} columns of {product.name!r} cannot be cut into {parts} equal parts"
        return ""

    def __str__(self) -> str:
        names = ("tensor", "pipeline", "data", "expert")
        parts = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1]
        return ", ".join(parts) or "one device"


def parts_of(product: Product, split: Degrees) -> int:
    """Over how many devices of a stage one product's weights are spread; every other device repeats them."""
    if product.experts:
        return split.tensor * split.data
    return min(split.tensor, product.parts or split.tensor)


def weight_bytes(work: DecoderWork, split: Degrees, storage: Storage) -> float:
    """Bytes of weights on the fullest device."""
    stages = work.layers / ceil(work.layers / split.pipeline)
    layers = sum(p.num_weights * BYTES[storage.dtype_of(p, work)] / parts_of(p, split) / stages for p in work.products)
    around = work.head.num_weights + work.looked_up
    if (
        split.pipeline > 1 and work.looked_up >= work.head.num_weights
    ):  # the first stage looks up, the last has the head
        around = work.looked_up
    return layers + around * BYTES[storage.dtype_of(work.head, work)] / split.tensor


def cache_bytes_per_token(work: DecoderWork, split: Degrees, storage: Storage) -> float:
    """Bytes that one token takes in the cache of one device, on average over the groups that attend to their own.

    Windows are not counted: the scheduler's blocks hold a sequence as a whole.
    """
    stages = work.layers / ceil(work.layers / split.pipeline)
    scale = _SCALE if storage.scaled and BYTES[storage.cache] < 2 else 0.0
    kept = sum(
        a.count * a.kept * (BYTES[storage.cache] + scale / a.key_dim) / min(split.tensor, a.kv_heads)
        for a in work.attention
    )
    return kept / stages / split.data


def cache_tokens(work: DecoderWork, split: Degrees, storage: Storage, memory_bytes: float) -> int:
    """Tokens that fit into the caches of one replica beside its weights; below 0 where the weights alone do not fit."""
    left = memory_bytes * USABLE - weight_bytes(work, split, storage)
    return int(left / cache_bytes_per_token(work, split, storage))
