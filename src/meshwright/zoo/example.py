"""Makes a runnable, traceable example out of a model's name: its train step, and the shapes of its arguments."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, get_args, get_origin

from meshwright.zoo.catalogue import Entry, ZooError, entry
from meshwright.zoo.options import ATTENTION, CHECKPOINTS, DTYPES, checkpoint_parts

PyTree = Any
_NAMED = {"attention": ATTENTION, "checkpoint": CHECKPOINTS}  # options that have one of some names


@dataclass(frozen=True)
class Example:
    """A model with a full train step, described by shapes only; nothing is allocated until `init` is called.

    Attributes:
        config: The family's frozen `Config`, after all options.
        train_step: `train_step(state, batch) -> (new_state, loss)`, jitted with the state donated.
        loss: `loss(params, batch) -> scalar`, what the train step differentiates.
        state: Shapes of the train state: `{"params", "mu", "nu", "step"}`.
        batch: Shapes of one batch.
        init: `init(key) -> state`, as real arrays. The key is JAX's, or a whole number: then NumPy draws, which is
            quicker because nothing is compiled, but cannot be traced.
        sample: `sample(key) -> batch`, a real batch of random data, from either kind of key.
        num_params: The number of parameters, counted from the shapes.
    """

    name: str
    description: str
    config: Any
    train_step: Callable[[PyTree, PyTree], tuple[PyTree, Any]]
    loss: Callable[[PyTree, PyTree], Any]
    state: PyTree
    batch: PyTree
    init: Callable[[Any], PyTree]
    sample: Callable[[Any], PyTree]
    num_params: int


def build(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    layers: int | None = None,
    scan: bool = False,
    checkpoint: bool | str = "none",
    **options: Any,
) -> Example:
    """Builds a model of the zoo by name.

    Args:
        name: One of `zoo.names()`.
        batch: Global batch size; the catalogue's own when None.
        seq: Sequence length; models that have none, such as the vision models, refuse it.
        layers: Number of layers instead of the published one (for wide-resnet and unet: blocks per stage).
        scan: Stack the layers' weights and `jax.lax.scan` over them instead of unrolling.
        checkpoint: What the backward pass recomputes: `"none"`, `"selective"` (all but products with weights and fused
            attention), `"alternate"` (every second product as well, as torchtitan does) or `"full"` (whole layers);
            True is full, False none. ``"full:2/3"`` is two layers of three, spread evenly.
        **options: Any other field of the family's `Config`, e.g. `hidden=256`, `dtype="float32"`, `dropout=0.1`;
            `attention="fused"` or `"plain"` (by default fused where the chip that it is traced for has a kernel),
            `loss_chunks=1` for all logits at once.

    Returns:
        The example, as shapes. The same model has the same functions, so that JAX traces and compiles a model that is
        built again only once.

    Example:
        >>> example = build("mlp", batch=256, hidden=32, layers=6)
        >>> example.num_params
        6336
    """
    model = entry(name)
    family = import_module(f"meshwright.zoo.{model.family}")
    config = _configure(family.Config, model, layers=layers, scan=scan, checkpoint=checkpoint, options=options)
    if seq is not None and not model.seq:
        raise ZooError(f"seq={seq!r} is given, and {name!r} has no sequence; leave seq out.")
    batch = _positive("batch", model.batch if batch is None else batch)
    seq = _positive("seq", model.seq if seq is None else seq) if model.seq else None
    _check(name, config, seq)
    return of_config(model.name, model.description, config, batch, seq)


def of_config(
    name: str, description: str, config: Any, batch: int, seq: int | None, param_dtype: str = "float32"
) -> Example:
    """The functions of a model with some `Config` of a family, and the shapes of its state and batch."""
    import jax  # here, so that listing the zoo needs no JAX

    from meshwright.zoo.draw import source

    family = import_module(type(config).__module__)
    train_step, loss, init = _functions(name, config, param_dtype)

    def sample(key: Any) -> PyTree:
        return family.sample(config, source(key), batch, seq)

    key = jax.random.key(0)
    state = jax.eval_shape(init, key)
    return Example(
        name=name,
        description=description,
        config=config,
        train_step=train_step,
        loss=loss,
        state=state,
        batch=jax.eval_shape(sample, key),
        init=init,
        sample=sample,
        num_params=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state["params"])),
    )


@lru_cache(maxsize=64)  # JAX keeps what it traced and compiled for as long as the function is there
def _functions(name: str, config: Any, param_dtype: str) -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """The train step, jitted, the loss and the initialiser of a model."""
    import jax

    from meshwright.zoo import train
    from meshwright.zoo.draw import source

    module = import_module(type(config).__module__)

    def loss(params: PyTree, batch: PyTree) -> "jax.Array":
        return module.loss(config, params, batch)

    def init(key: Any) -> PyTree:
        params = module.init(config, source(key))
        if param_dtype != "float32":
            params = jax.tree.map(lambda weight: weight.astype(param_dtype), params)
        return train.init_state(params)

    step = train.make_train_step(loss, getattr(module, "OPTIMIZER", train.AdamW()))
    step.__qualname__ = name  # what plans and pages call it
    return jax.jit(step, donate_argnums=0), loss, init


def _configure(
    config_class: Any, model: Entry, *, layers: int | None, scan: bool, checkpoint: bool | str, options: dict[str, Any]
) -> Any:
    fields = {field.name for field in dataclasses.fields(config_class)}
    unknown = sorted(set(options) - fields)
    if unknown:
        options_of_model = ", ".join(sorted(fields - {"layers", "scan", "checkpoint"}))
        raise ZooError(f"{model.name!r} has no option {unknown[0]!r}; its options are {options_of_model}.")
    for field in dataclasses.fields(config_class):
        if field.name in options:
            check_option(model.name, field, options[field.name])
    if scan and "scan" not in fields:
        raise ZooError(f"{model.name!r} cannot be scanned, its layers differ in shape; leave out scan=True.")
    chosen: dict[str, Any] = model.shape | options
    chosen["checkpoint"] = _checkpoint(model.name, checkpoint, "scan" in fields and not scan)
    if scan:
        chosen["scan"] = True
    if layers is not None:
        chosen["layers"] = _positive("layers", layers)
    return config_class(**chosen)


def _checkpoint(model: str, checkpoint: bool | str, layers_differ: bool) -> str:
    """The checkpoint of a configuration; `layers_differ` says whether a part of the layers may have it."""
    if isinstance(checkpoint, bool):
        return "full" if checkpoint else "none"
    if not isinstance(checkpoint, str) or checkpoint.partition(":")[0] not in CHECKPOINTS:
        raise ZooError(f"checkpoint={checkpoint!r} is none of {', '.join(map(repr, CHECKPOINTS))}.")
    try:
        _, share = checkpoint_parts(checkpoint)
    except ValueError:
        raise ZooError(f"checkpoint={checkpoint!r} names no part of the layers; write it as 'full:1/2'.") from None
    if share < 1 and not layers_differ:
        raise ZooError(
            f"checkpoint={checkpoint!r} is of a part of the layers, and those of {model!r} are scanned or no plain "
            "stack, so all of them do the same; leave out scan=True, or the part."
        )
    return checkpoint


def check_option(model: str, field: Any, value: Any) -> None:
    """Refuses a value that is not of the type of a field of `Config`, a size below 1, and a dtype that is none."""
    kinds = {get_origin(kind) or kind for kind in get_args(field.type) or (field.type,)}
    if float in kinds:
        kinds.add(int)
    if type(value) not in kinds and not (value is None and type(None) in kinds):
        known = " or ".join(sorted(kind.__name__ for kind in kinds if kind is not type(None)))
        raise ZooError(
            f"{field.name}={value!r} of {model!r} is a {type(value).__name__}; give a value of type {known}."
        )
    if type(value) is int and value < 1 and not (value == 0 and field.default == 0):
        raise ZooError(f"{field.name}={value} of {model!r} must be a positive whole number.")
    if field.name == "dtype" and value not in DTYPES:
        raise ZooError(f"dtype={value!r} of {model!r} is none of {', '.join(DTYPES)}.")
    if field.name in _NAMED and value not in (None, *_NAMED[field.name]):
        raise ZooError(f"{field.name}={value!r} is none of {', '.join(map(repr, _NAMED[field.name]))}.")


def _check(name: str, config: Any, seq: int | None) -> None:
    """Catches what would otherwise surface as a shape error from inside JAX, or be rounded in silence."""
    positions = getattr(config, "positions", None)
    if seq and positions and seq > positions:
        raise ZooError(
            f"seq={seq} is longer than the {positions} positions of {name!r}; lower seq or pass positions={seq}."
        )
    chunks = getattr(config, "loss_chunks", None)
    if seq and chunks and seq % chunks:
        raise ZooError(f"loss_chunks={chunks} does not divide seq={seq}; choose a divisor.")
    chunk = min(getattr(config, "chunk", 1), seq or 1)
    if seq and seq % chunk:
        raise ZooError(f"seq={seq} is no multiple of chunk={chunk} of {name!r}; choose another of them.")
    for whole, part in (("hidden", "heads"), ("heads", "kv_heads"), ("image", "patch")):
        if _derived(config, whole, part) and getattr(config, whole) % getattr(config, part):
            raise ZooError(
                f"{whole}={getattr(config, whole)} of {name!r} is no multiple of {part}={getattr(config, part)}."
            )


def _derived(config: Any, whole: str, part: str) -> bool:
    """Whether one field must be a multiple of another; a model whose heads have a size of their own has no such tie."""
    own_size = any(field.name == "head_dim" for field in dataclasses.fields(config)) or getattr(
        config, "head_size", None
    )
    return getattr(config, part, None) is not None and not (whole == "hidden" and own_size)


def _positive(option: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ZooError(f"{option}={value!r} must be a positive whole number.")
    return value
