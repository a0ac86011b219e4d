"""What a decoder does for each token: its products with weights, and its attention over what the cache holds.

Both are read from the model of the zoo itself, without numbers: the types of its parameters say which products there
are, and a stand-in for what mixes queries, keys and values (`zoo.attention.Mix`) is told the heads and the window of
every layer.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import ServingError

if TYPE_CHECKING:
    import jax

#: Tables in which rows are looked up; the first is the head as well in models that have none.
_TABLES = ("embed", "positions")
#: Layers that are traced to see in which turn they attend; Gemma's has six.
_TRACED = 12
#: Kernels that all engines join, and those that most do: of these products each layer starts one.
_JOINED, _OFTEN_JOINED = ("k", "v"), ("up",)


@dataclass(frozen=True)
class Product:
    """Equal products of tokens with weights, one in each of some layers.

    Attributes:
        name: The parameter's, e.g. ``"gate"``.
        count: How many there are.
        rows: Numbers in the token that enters.
        columns: Numbers in what leaves.
        experts: How many weights there are to choose from; 0 where all tokens take the same.
        parts: Over how many devices tensor parallelism can spread one; 0 for any number.
    """

    name: str
    count: int
    rows: int
    columns: int
    experts: int = 0
    parts: int = 0

    @property
    def size(self) -> int:
        """Weights of one product, of one expert where there are several."""
        return self.rows * self.columns

    @property
    def num_weights(self) -> int:
        return self.count * self.size * max(1, self.experts)

    def starts_kernel(self, joins: bool) -> bool:
        """Whether it is not joined with another into one kernel, where those are joined that most engines do."""
        return self.name not in _JOINED and not (joins and self.name in _OFTEN_JOINED)


@dataclass(frozen=True)
class Attention:
    """The attention of some equal layers.

    Attributes:
        count: How many layers.
        heads: Heads of queries.
        kv_heads: Heads of keys and values; 1 where all heads of queries share one latent.
        key_dim: Numbers of a key that a score takes.
        value_dim: Numbers of a value.
        window: Positions that each one looks at; 0 for all.
        kept: Numbers that the cache keeps of a token and layer.
        prompt_dim: Numbers of a key and a value as prompts are computed, where a latent is expanded for them.
    """

    count: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    kept: int
    prompt_dim: int


@dataclass(frozen=True)
class DecoderWork:
    """What a model does, whatever it runs on.

    Attributes:
        name: The model's.
        layers: How many layers.
        hidden: Numbers of an activation between layers.
        vocab: Tokens to choose from.
        products: The products with weights, without the head's.
        head: The product that scores the next token.
        attention: The kinds of attention.
        looked_up: Weights that are looked up and not multiplied.
        active: Experts that serve each token.
        most_positions: The longest sequence that it can have; 0 where nothing says.
        config: The zoo's `Config`.
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    products: tuple[Product, ...]
    head: Product
    attention: tuple[Attention, ...]
    looked_up: int
    active: int
    most_positions: int
    config: Any

    @property
    def num_weights(self) -> int:
        """All weights but norms and biases."""
        return sum(p.num_weights for p in self.products) + self.head.num_weights + self.looked_up

    @property
    def num_experts(self) -> int:
        return max((p.experts for p in self.products), default=0)

    @property
    def kv_heads(self) -> int:
        """Over how many devices the cache can be spread by heads."""
        return min(a.kv_heads for a in self.attention)

    @property
    def flops_per_token(self) -> float:
        """FLOPs of the products of one token, the head's left out."""
        return sum(2.0 * p.count * p.size * (self.active if p.experts else 1) for p in self.products)


def decoder_work(model: Any) -> DecoderWork:
    """The work of a model.

    Args:
        model: A name of the zoo such as ``"llama3-8b"``, the folder of a checkpoint of Hugging Face, a `Config` of the
            zoo, or what has one as ``.config``.

    >>> work = decoder_work("llama3-8b")
    >>> work.layers, work.attention[0].kept, round(work.num_weights / 1e9, 2)
    (32, 2048, 8.03)
    """
    name, config = _config_of(model)
    return _work_of(name, config)


def _config_of(model: Any) -> tuple[str, Any]:
    from meshwright.hf.configuration import read_config
    from meshwright.hf.files import folder_of
    from meshwright.zoo.catalogue import entry

    if isinstance(model, Path) or (isinstance(model, str) and ("/" in model or Path(model).is_dir())):
        folder = folder_of(model)
        return folder.name, read_config(folder, {})[1]
    if isinstance(model, str):
        shape = entry(model)
        return model, import_module(f"meshwright.zoo.{shape.family}").Config(**shape.shape)
    config = getattr(model, "config", model)
    if not dataclasses.is_dataclass(config):
        raise ServingError(
            f"model is {model!r:.80}; give a name of the zoo such as 'llama3-8b', the folder of a checkpoint, or a "
            "config"
        )
    return str(getattr(model, "name", type(config).__module__.rpartition(".")[2])), config


@lru_cache(maxsize=64)
def _work_of(name: str, config: Any) -> DecoderWork:
    import jax

    family = import_module(type(config).__module__)
    if not hasattr(config, "kv_rank") and not hasattr(family, "logits"):
        raise ServingError(f"{name} generates no text: it is no decoder; give one such as 'llama3-8b'")
    own = {field.name for field in dataclasses.fields(config)}
    stacked = {"scan": True, "checkpoint": "none", "group_size": 1}  # one layer is traced instead of all
    config = dataclasses.replace(config, **{key: value for key, value in stacked.items() if key in own})
    params = jax.eval_shape(partial(family.init, config), jax.random.key(0))
    products, tables = _products(params, getattr(config, "experts", 0))
    heads = [p for p in products if p.name == "head"]
    head = heads[0] if heads else Product("head", 1, config.hidden, config.vocab)
    return DecoderWork(
        name=name,
        layers=config.layers,
        hidden=config.hidden,
        vocab=config.vocab,
        products=tuple(p for p in products if p.name != "head"),
        head=head,
        attention=_latent(config) if hasattr(config, "kv_rank") else _attention(family, config, params),
        looked_up=sum(tables.values()) - (0 if heads else tables["embed"]),
        active=config.active if getattr(config, "experts", 0) else 0,
        most_positions=getattr(config, "positions", 0) or 0,
        config=config,
    )


def _products(params: Any, experts: int) -> tuple[list[Product], dict[str, int]]:
    """The products that the parameters of two dims or more stand for, equal ones counted; and the sizes of tables."""
    import jax

    counts: Counter[Product] = Counter()
    tables: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = str(getattr(path[-1], "key", path[-1]))
        times, shape = (leaf.shape[0], leaf.shape[1:]) if path[0].key == "layers" else (1, leaf.shape)
        if len(shape) < 2 or name.endswith("_bias"):
            continue
        if name in _TABLES:
            tables[name] = prod(shape)
            continue
        chosen = experts if name in ("gate", "up", "down") and len(shape) == 3 else 0
        counts[_product(name, shape[1:] if chosen else shape, chosen)] += times
    return [dataclasses.replace(product, count=count) for product, count in counts.items()], tables


def _product(name: str, shape: tuple[int, ...], experts: int) -> Product:
    if name == "head":
        return Product(name, 1, shape[1], shape[0])
    rows, columns = (prod(shape[:-1]), shape[-1]) if name == "o" else (shape[0], prod(shape[1:]))
    if name in ("k", "v") and len(shape) == 3:
        return Product(name, 1, rows, columns, experts, shape[1])
    # Whatever makes a latent or chooses experts is small, and every device repeats it.
    whole = name in ("router", "q_down", "kv_down", "k_rotated")
    return Product(name, 1, rows, columns, experts, 1 if whole else 0)


def _attention(family: Any, config: Any, params: Any) -> tuple[Attention, ...]:
    """What the layers ask of the mix, equal ones counted; a few layers are traced, and the others take turns alike."""
    import jax
    import jax.numpy as jnp

    calls: list[Attention] = []

    def record(q: "jax.Array", k: "jax.Array", v: "jax.Array", **options: Any) -> "jax.Array":
        (heads, key_dim), (kv_heads, value_dim) = q.shape[2:], v.shape[2:]
        kept, window = kv_heads * (key_dim + value_dim), options.get("window") or 0
        calls.append(Attention(1, heads, kv_heads, key_dim, value_dim, window, kept, key_dim + value_dim))
        return jnp.zeros((*q.shape[:3], value_dim), q.dtype)

    depth = min(config.layers, _TRACED)
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"])
    few = dataclasses.replace(config, layers=depth, scan=False)
    tokens = jax.ShapeDtypeStruct((1, 8), "int32")
    given = params | {"layers": [layer] * depth}
    jax.eval_shape(lambda params, tokens: family.logits(few, params, tokens, None, record), given, tokens)
    turn = next(n for n in range(1, depth + 1) if calls == [calls[i % n] for i in range(depth)])
    counts = Counter(calls[i % turn] for i in range(config.layers))
    return tuple(dataclasses.replace(call, count=count) for call, count in counts.items())


def _latent(config: Any) -> tuple[Attention, ...]:
    """Multi-head latent attention (arXiv:2405.04434): the cache keeps a latent that all heads of queries share."""
    key_dim = config.kv_rank + config.rotated_dim
    prompt_dim = config.plain_dim + config.rotated_dim + config.value_dim
    return (Attention(config.layers, config.heads, 1, key_dim, config.kv_rank, 0, key_dim, prompt_dim),)
