"""The order of the data: which windows of tokens make up which batch, the same on any number of processes.

Windows of `seq` tokens follow each other in the data, which is documents one after the other. Grain draws a permutation
of them for each pass, which it can evaluate at any position. Batch k has positions k·rows to (k+1)·rows of these passes
one after the other, so the number of a batch is all that a run has to keep in order to continue: each process finds its
own rows of any batch from it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from meshwright.errors import TrainingError
from meshwright.trainer.tokens import Tokens

Batch = dict[str, np.ndarray[Any, Any]]
_THREADS = 2
_SAMPLES = 64  # windows, evenly spread, whose tokens are looked at before a run
_AHEAD = 4  # batches that Grain reads ahead; `mw.batches` has two more


class Windows:
    """Windows of tokens with the token that follows each: what Grain calls a random-access source.

    Args:
        tokens: The data.
        seq: Tokens of a window.
        first, last: The range of windows that are taken, as shares of all.
        vocab: The vocabulary of the model.
    """

    def __init__(self, tokens: Tokens, seq: int, vocab: int, first: float = 0.0, last: float = 1.0):
        if tokens.vocab is not None and tokens.vocab > vocab:
            raise TrainingError(
                f"the tokenizer has {tokens.vocab} tokens and the model {vocab}; give the model's own tokenizer, or a "
                f"larger vocab in [shape]"
            )
        self._tokens, self._seq = tokens, seq
        self._vocab, self._whose = min((vocab, "model"), (tokens.vocab or vocab, "tokenizer"))
        count = max(0, len(tokens) - 1) // seq
        self._first, self._last = round(first * count), round(last * count)
        if self._last <= self._first:
            raise TrainingError(
                f"the data has {len(tokens)} tokens, too few for sequences of {seq}; give more data or a smaller seq"
            )
        for number in range(0, len(self), -(-len(self) // _SAMPLES)):
            self[number]  # tokens of another vocabulary are refused now, and not in the midst of the run

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, number: int) -> np.ndarray[Any, Any]:
        window = self._tokens.read((self._first + number) * self._seq, self._seq + 1)
        if (top := int(window.max())) >= self._vocab or window.min() < 0:
            raise TrainingError(
                f"the data has a token {top if top >= self._vocab else int(window.min())}, and the {self._whose}'s are "
                f"0 to {self._vocab - 1}; check data.dtype, or give the data's own tokenizer"
            )
        return window

    def __repr__(self) -> str:
        return f"Windows({len(self)} of {self._seq} tokens)"  # Grain shows it


def ordered_batches(
    windows: Windows, rows: int, start: int, stop: int, *, seed: int | None, part: int = 0, num_parts: int = 1
) -> Iterator[Batch]:
    """One process's rows of the batches from `start` up to `stop`, read ahead by threads of Grain.

    Args:
        windows: The data.
        rows: Sequences of a whole batch, of which each of `num_parts` processes reads an equal part.
        start, stop: Numbers of batches.
        seed: Of the order; None for the order of the data itself.
        part: Which process this is.
        num_parts: How many there are.
    """
    import grain

    source = grain.MapDataset.source(windows)
    shuffled = source if seed is None else source.seed(seed).shuffle()
    endless = shuffled.repeat()
    own = rows // num_parts

    def read(number: int) -> Batch:
        begin = int(number) * rows + part * own
        both = np.stack([endless[position] for position in range(begin, begin + own)])
        return {"tokens": both[:, :-1], "labels": both[:, 1:]}

    options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_AHEAD)
    yield from grain.MapDataset.range(start, stop).map(read).to_iter_dataset(options)


def check_parts(rows: int, num_parts: int) -> None:
    """Refuses a batch that processes cannot share equally."""
    if rows % num_parts:
        raise TrainingError(
            f"a batch has {rows} sequences, which {num_parts} processes cannot share equally; choose batch_tokens so "
            f"that it is a multiple of seq × {num_parts}"
        )
