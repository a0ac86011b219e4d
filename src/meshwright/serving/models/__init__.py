"""The decoding form of the zoo's decoders: one step over prompts and running sequences, with a cache, and sampling.

The layers are those that are trained (`zoo/`): they take positions and what mixes queries, keys and values, and a cache
mixes here. `decoder.py` is the step, `work.py` what it is told, `caches.py` keeps keys and values, `ragged.py` as TPUs
want them and `triton.py` as GPUs do, `attention.py` picks the kernel, `joined.py` joins
products, `sampling.py` draws the tokens, and `shaping.py` changes their scores.
"""

from meshwright.serving.models.caches import Cache, PagedCache, SlotCache
from meshwright.serving.models.decoder import Decoder
from meshwright.serving.models.joined import join_products
from meshwright.serving.models.ragged import RaggedCache
from meshwright.serving.models.sampling import Draw, Drawn, Kind
from meshwright.serving.models.triton import TritonCache
from meshwright.serving.models.work import StepShape

__all__ = [
    "Cache",
    "Decoder",
    "Draw",
    "Drawn",
    "Kind",
    "PagedCache",
    "RaggedCache",
    "SlotCache",
    "StepShape",
    "TritonCache",
    "join_products",
]
