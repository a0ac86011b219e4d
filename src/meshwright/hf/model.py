"""`mw.hf.load`: a model of Hugging Face as a model of the zoo, whose parameters each device reads its own parts of."""

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten_with_path, tree_unflatten

from meshwright.arrays import PyTree
from meshwright.errors import CheckpointError
from meshwright.hf.architectures import Architecture
from meshwright.hf.configuration import read_config
from meshwright.hf.files import folder_of
from meshwright.hf.layout import Place, path_of
from meshwright.hf.layout import place as place_of
from meshwright.hf.reading import read_parameters, stored_dtype
from meshwright.hf.targets import Target, targets
from meshwright.hf.tensors import Tensors
from meshwright.hf.tokenizer import Tokenizer, read_tokenizer
from meshwright.progress import progress
from meshwright.zoo.example import Example, of_config
from meshwright.zoo.options import DTYPES


@dataclass(frozen=True)
class Model:
    """A model of Hugging Face; made by `mw.hf.load`.

    Attributes:
        path: The folder it was loaded from.
        config: The `Config` of the zoo's model.
        architecture: How the checkpoint's names and keys are mapped.
        like: Where the parameters go; None for one device.
        param_dtype: The dtype of parameters; None for the checkpoint's.
    """

    path: Path
    config: Any
    architecture: Architecture
    tensors: Tensors
    like: Any = None
    param_dtype: str | None = None

    @cached_property
    def params(self) -> PyTree:
        """The parameters, read when they are first asked for."""
        with progress() as say:
            say(f"reading {self.path}")
            arrays = read_parameters(self._places, self._targets, self.tensors, self.param_dtype)
        return tree_unflatten(self._tree, arrays)

    def forward(self, params: PyTree, input_ids: Any) -> jax.Array:
        """The scores of each position's next token, (batch, seq) to (batch, seq, vocab); a pure function."""
        return import_module(type(self.config).__module__).logits(self.config, params, jnp.asarray(input_ids))

    def example(self, batch: int, seq: int) -> Example:
        """The model with a train step, as `zoo.build` gives it: `train_step`, and the types of `state` and `batch`."""
        about = f"{self.architecture.model_type} of {self.path}"
        dtype = self.param_dtype or str(stored_dtype(self._places[0], self.tensors))
        return of_config(self.path.resolve().name, about, self.config, batch, seq, dtype)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the weights."""
        return read_tokenizer(self.path, vocab=self.config.vocab)

    def check(self) -> None:
        """Refuses files that are not of the model, and a `like` that has no places for its parameters."""
        assert len(self._targets) == len(self._places)

    @cached_property
    def _shapes(self) -> PyTree:
        init = import_module(type(self.config).__module__).init
        return jax.eval_shape(lambda key: init(self.config, key), jax.random.key(0))

    @property
    def _tree(self) -> Any:
        return jax.tree.structure(self._shapes)

    @cached_property
    def _places(self) -> list[Place]:
        """Where each parameter is in the checkpoint, after a check that everything is there."""
        return find_places(self.architecture, self._shapes, self.tensors)

    @cached_property
    def _targets(self) -> list[Target]:
        """Where each parameter goes."""
        found = targets(self.like, [place.path for place in self._places])
        for place, target in zip(self._places, found, strict=True):
            if target.shape not in (None, place.shape):
                raise CheckpointError(f"like: {place.path} has shape {target.shape}, and the model's has {place.shape}")
        return found


def find_places(architecture: Architecture, shapes: PyTree, tensors: Tensors | None) -> list[Place]:
    """Where each parameter of some shapes is in a checkpoint.

    Args:
        architecture: How names are mapped.
        shapes: The parameters, or their shapes.
        tensors: The checkpoint, which is checked; None for one that is to be written.
    """
    prefix = architecture.prefixes[0]
    if tensors is not None:
        prefix = next((p for p in architecture.prefixes if any(name.startswith(p) for name in tensors.all)), prefix)
    is_packed = tensors is not None and tensors.are_packed
    weights = (*architecture.packed * is_packed, *architecture.weights)  # of several the first is taken
    places = []
    for path, leaf in tree_flatten_with_path(shapes)[0]:
        place = place_of(weights, path_of(path), tuple(leaf.shape))
        places.append(place.named(prefixed(prefix, place.name)))
    if tensors is not None:
        unused = [prefixed(prefix, name) for name in architecture.unused]
        tensors.check_names((name for place in places for name, _ in place.tensors()), unused, str(tensors.folder))
        for place in places:
            _check(place, tensors)
    return places


def prefixed(prefix: str, name: str) -> str:
    """A tensor's full name; those that begin with a slash have no prefix."""
    return name.removeprefix("/") if name.startswith("/") else prefix + name


def _check(place: Place, tensors: Tensors) -> None:
    """Refuses tensors of a shape that is not the model's, or of several dtypes where they are joined."""
    kinds = set()
    for name, _ in place.tensors():
        tensor = tensors.all[name]
        kinds.add(tensor.dtype)
        if tensor.shape != place.tensor_shape:
            raise CheckpointError(
                f"{tensor.file}: {name} has shape {tensor.shape}, and config.json makes it {place.tensor_shape}"
            )
    if len(kinds) > 1:
        listed = " and ".join(sorted(map(str, kinds)))
        raise CheckpointError(
            f"{tensors.folder}: the tensors of {place.path} have dtypes {listed}; convert them to one"
        )


def load(
    path: str | PathLike[str],
    *,
    like: Any = None,
    param_dtype: str | None = None,
    **options: Any,
) -> Model:
    """Loads a model of Hugging Face: its configuration now, its parameters when they are first asked for.

    Names, shapes and dtypes of all tensors are checked now. Nothing in the folder is run.

    Args:
        path: The folder with `config.json` and safetensors files.
        like: Where parameters go: a parallelised function that has a plan and whose state holds them under `params`,
            or a tree like the parameters' of arrays or `jax.ShapeDtypeStruct`s with shardings. Each device then reads
            its own parts only, in the dtypes that are planned. By default all goes to the first device.
        param_dtype: The dtype of parameters, such as `"float32"` to train a model whose checkpoint is in bfloat16; by
            default that of the checkpoint.
        **options: Fields of the zoo's `Config`, such as `dtype` for what is computed in, `scan=True`,
            `checkpoint="selective"`, or `group_size=512` for mixtures of experts, which then drop tokens.

    Returns:
        The model.

    Raises:
        CheckpointError: There is no such model, a file is missing or damaged, or the zoo's models cannot compute it.

    Examples:
        >>> import tempfile, meshwright as mw
        >>> from meshwright import zoo
        >>> tiny = zoo.build("llama-tiny", layers=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mw.hf.save(f"{folder}/tiny", tiny.init(0)["params"], tiny.config)
        ...     model = mw.hf.load(f"{folder}/tiny")
        ...     model.params["embed"].shape
        (256, 64)
        >>> model.forward(model.params, [[1, 2, 3]]).shape
        (1, 3, 256)
        >>> step = mw.parallelize(model.example(batch=8, seq=32).train_step)
    """
    folder = folder_of(path)
    if param_dtype is not None and param_dtype not in DTYPES:
        raise CheckpointError(f"param_dtype is {param_dtype!r}, which is none of {', '.join(DTYPES)}")
    architecture, config = read_config(folder, options)
    model = Model(folder, config, architecture, Tensors(folder), like, param_dtype)
    model.check()
    return model
