"""`mw.get_model`: a model of Hugging Face that generates, with Hugging Face's interface and the engine behind it."""

from collections.abc import Iterator, Sequence
from numbers import Integral
from os import PathLike
from types import TracebackType
from typing import Any

import numpy as np

from meshwright.errors import ServingError
from meshwright.hardware import Cluster
from meshwright.planner.methods import Method
from meshwright.progress import Say
from meshwright.serving.arrangement import arranged
from meshwright.serving.engine import Engine, Fleet
from meshwright.serving.handle import Handle
from meshwright.serving.loading import ModelPlan, load_model
from meshwright.serving.planning.promise import Slo
from meshwright.serving.planning.serving_plan import ServingPlan
from meshwright.serving.planning.traffic import Traffic
from meshwright.serving.requests import Overloaded, Sampling
from meshwright.serving.sizes import Sizes

Tokens = Sequence[int] | Sequence[Sequence[int]] | np.ndarray


class LanguageModel:
    """A model that generates; made by `mw.get_model`.

    Attributes:
        engine: What runs it; `mw.get_model`'s methods may be called from several threads at once.
        plan: How it is split, its cache and its limits; `print(model.plan)` explains them.
    """

    def __init__(self, engine: Engine | Fleet, plan: ModelPlan, pad: int):
        self.engine, self.plan, self._pad = engine, plan, pad

    def generate(
        self,
        input_ids: Tokens,
        *,
        attention_mask: np.ndarray | None = None,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        min_new_tokens: int = 0,
        do_sample: bool = False,
        temperature: float | None = 1.0,
        top_k: int | None = 50,
        top_p: float | None = 1.0,
        seed: int | None = None,
        num_return_sequences: int = 1,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
    ) -> np.ndarray:
        """Continues prompts, as `generate` of transformers does.

        Args:
            input_ids: Tokens: (batch, seq), or a list of prompts of any lengths, or one prompt.
            attention_mask: 0 for padding in `input_ids`, on either side.
            max_new_tokens: The most tokens to generate for each prompt; 20 by default.
            max_length: The most tokens with the prompt and its padding, in place of it.
            min_new_tokens: No token ends a text before there are so many.
            do_sample: Whether tokens are drawn; otherwise each is the likeliest one.
            temperature: Of the draw; None for 1.
            top_k: Of how many of the likeliest tokens is drawn; None or 0 for all.
            top_p: How much probability those have together that are drawn from; None for all.
            seed: Texts are the same for the same seed, whatever else is computed; each row has its own draws.
            num_return_sequences: How many texts for each prompt.
            eos_token_id: Which tokens end a text; by default those of the model's configuration, `()` for none.
            pad_token_id: What fills rows up; by default the configuration's.

        Returns:
            (batch x num_return_sequences, longest): each row its prompt, then the new tokens, then padding.

        Raises:
            ServingError: An argument cannot be used; the message says what would do.
        """
        rows = _rows(input_ids)
        masks = [np.ones(len(row), bool) for row in rows] if attention_mask is None else _masks(attention_mask, rows)
        if _whole("num_return_sequences", num_return_sequences) < 1:
            raise ServingError(f"num_return_sequences is {num_return_sequences}; give at least 1")
        pad = self._pad if pad_token_id is None else _whole("pad_token_id", pad_token_id)
        handles: list[Handle] = []
        texts: list[list[int]] = []
        asked = (max_new_tokens, max_length, min_new_tokens, do_sample, temperature, top_k, top_p)
        try:
            for number in range(len(rows) * num_return_sequences):
                row, mask = (of[number // num_return_sequences] for of in (rows, masks))
                prompt = row[mask].tolist()
                own_seed = None if seed is None else _whole("seed", seed) + number
                sampling = _sampling(len(row), *asked, own_seed, eos_token_id)
                while True:
                    try:
                        handles.append(self.engine.submit(prompt, sampling))
                        break
                    except Overloaded:
                        if len(texts) == len(handles):  # the queue is full of others' requests
                            raise
                        texts.append([token.id for token in handles[len(texts)]])
            texts += [[token.id for token in handle] for handle in handles[len(texts) :]]
        finally:
            for handle in handles:
                handle.cancel()
        whole = [[*rows[at // num_return_sequences].tolist(), *text] for at, text in enumerate(texts)]
        longest = max(map(len, whole))
        return np.array([[*row, *[pad] * (longest - len(row))] for row in whole], np.int64)

    def stream(
        self,
        input_ids: Tokens,
        *,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        min_new_tokens: int = 0,
        do_sample: bool = False,
        temperature: float | None = 1.0,
        top_k: int | None = 50,
        top_p: float | None = 1.0,
        seed: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> Iterator[int]:
        """Continues one prompt and yields each new token as it comes; the arguments are those of `generate`.

        A reader that stops early ends the request.
        """
        rows = _rows(input_ids)
        if len(rows) != 1:
            raise ServingError(f"stream was given {len(rows)} prompts; give one, or use generate")
        asked = (max_new_tokens, max_length, min_new_tokens, do_sample, temperature, top_k, top_p)
        handle = self.engine.submit(rows[0].tolist(), _sampling(len(rows[0]), *asked, seed, eos_token_id))
        return _read(handle)

    def close(self) -> None:
        """Ends the engine; open requests are cancelled."""
        self.engine.close()

    def __enter__(self) -> "LanguageModel":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def get_model(
    path: str | PathLike[str],
    *,
    cluster: Cluster | str = "local",
    slo: Slo | None = None,
    method: Method | str | None = None,
    max_len: int | None = None,
    slots: int | None = None,
    chunk: int | None = None,
    blocks: int | None = None,
    block_size: int | None = None,
    queue: int | None = None,
    cache: str | None = None,
    cache_dtype: str | None = None,
    replicas: int | None = None,
    stages: int | None = None,
    apart: tuple[int, int] | None = None,
    plan: ServingPlan | None = None,
    traffic: Traffic | None = None,
    on_progress: Say | None = None,
    **options: Any,
) -> LanguageModel:
    """Loads a model of Hugging Face to generate with: plans its steps, and compiles all that will be needed.

    Args:
        path: The folder with `config.json` and safetensors files.
        cluster: The devices, as `mw.plan` takes them; all local ones by default.
        slo: A promise, such as ``mw.Slo(ttft_s=0.5, tpot_s=0.03)``: slots and chunk are made so small that every step
            keeps it, by the cost model. By default there are as many as memory allows.
        method: How several devices share the model: a method of `mw.plan` or its short name; `mw.Auto()` by default.
        max_len: The most tokens of a text with its prompt; by default as many as the model reads, up to 4,096.
        slots: The most texts at once; by default what the memory holds.
        chunk: The most tokens of prompts in one step; a longer prompt takes several.
        blocks: Blocks of the cache, by default what the memory holds.
        block_size: Tokens in a block.
        queue: The most requests that wait.
        cache: "paged" shares the prefixes of prompts, "slots" has the fastest kernels on GPUs and copies prefixes; by
            default slots there and pages elsewhere.
        cache_dtype: "int8" or "float8" keeps keys and values in 8 bits, for twice as many tokens; answers change a
            little (`docs/guides/serve.md`), so that it is never chosen unasked. By default the model's own type.
        replicas: Copies of the model on devices of their own, among which requests are shared out; 1 by default.
        stages: Stages of layers into which each replica is cut, on devices of their own; by default as few as it fits
            in, which is 1 mostly.
        apart: How many replicas compute prompts, and how many answers; each cache is sent from the one to the other.
        plan: What `mw.plan_serving` chose, in place of these three: its replicas, their split and their batches. Sizes
            that are given here stand in place of its own.
        traffic: A load, in place of `plan`: it is planned for here, under `slo`.
        on_progress: Is told what is done; else a line on stderr shows it.
        **options: Fields of the zoo's `Config` as in `mw.hf.load`, such as ``dtype="float32"``.

    Returns:
        The model; `close()` it, or use it in a `with`.

    Raises:
        CheckpointError: There is no such model, or its files are damaged.
        DoesNotFit: Parameters and cache are larger than the devices' memory.
        ServingError: Another argument cannot be used.

    Examples:
        >>> import tempfile, meshwright as mw
        >>> from meshwright import zoo
        >>> tiny = zoo.build("llama-tiny", layers=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mw.hf.save(f"{folder}/tiny", tiny.init(0)["params"], tiny.config)
        ...     with mw.get_model(f"{folder}/tiny", max_len=32, slots=1, chunk=16) as model:
        ...         model.generate([[1, 2, 3], [4, 5]], max_new_tokens=4).shape
        (2, 7)
    """
    sizes = Sizes(max_len, slots, chunk, blocks, block_size, queue, cache, cache_dtype)
    loaded = load_model(
        path,
        cluster=cluster,
        slo=slo,
        method=method,
        sizes=sizes,
        arrangement=arranged(replicas, stages, apart, plan, traffic),
        traffic=traffic,
        on_progress=on_progress,
        **options,
    )
    return LanguageModel(loaded.engine, loaded.plan, loaded.pad)


def _read(handle: Handle) -> Iterator[int]:
    try:
        for token in handle:
            yield token.id
    finally:
        handle.cancel()


def _rows(input_ids: Tokens) -> list[np.ndarray]:
    """The prompts, each as one line of tokens."""
    try:
        nested = [np.asarray(row) for row in input_ids]
        rows = nested if nested and all(row.ndim for row in nested) else [np.asarray(input_ids)]
    except (TypeError, ValueError):
        rows = []
    if not rows or any(row.ndim != 1 or not row.size or row.dtype.kind not in "iu" for row in rows):
        raise ServingError(
            "input_ids must be tokens, (batch, seq) or a list of prompts, each with one whole number at least"
        )
    return rows


def _masks(attention_mask: np.ndarray, rows: list[np.ndarray]) -> list[np.ndarray]:
    try:
        masks = [np.asarray(mask).astype(bool) for mask in attention_mask]
    except (TypeError, ValueError):
        masks = []
    masks = [np.array(masks)] if masks and not masks[0].ndim else masks  # of one prompt
    if [mask.shape for mask in masks] != [row.shape for row in rows]:
        raise ServingError("attention_mask must have the shape of input_ids")
    if not all(mask.any() for mask in masks):
        raise ServingError("attention_mask leaves nothing of a prompt; each needs one token at least")
    return masks


def _whole(name: str, value: object) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ServingError(f"{name} is {value!r}; give a whole number")
    return int(value)


def _sampling(
    prompt: int,
    max_new_tokens: int | None,
    max_length: int | None,
    min_new_tokens: int,
    do_sample: bool,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    eos_token_id: int | Sequence[int] | None,
) -> Sampling:
    if max_new_tokens is None:
        max_new_tokens = 20 if max_length is None else _whole("max_length", max_length) - prompt
        if max_new_tokens < 1:
            raise ServingError(f"max_length is {max_length}, and the prompt has {prompt} tokens already; give more")
    ends = () if eos_token_id is None else np.atleast_1d(np.asarray(eos_token_id))
    return Sampling(
        max_tokens=max_new_tokens,
        min_tokens=min_new_tokens,
        temperature=(1.0 if temperature is None else temperature) if do_sample else 0.0,
        top_k=0 if top_k is None else top_k,
        top_p=1.0 if top_p is None else top_p,
        seed=seed,
        stop_token_ids=tuple(_whole("eos_token_id", end) for end in ends),
        ignore_eos=eos_token_id is not None,
    )
