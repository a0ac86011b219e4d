"""Tokens of documents: tokenised once into one file, and then read in place, from any position."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import TrainingError
from meshwright.trainer.documents import Files, find_files, read_documents
from meshwright.trainer.settings import Data

_FLUSH = 1 << 20  # bytes of tokens that are collected before they are written
_BYTES = 256  # the vocabulary of bytes


class Tokens:
    """A sequence of tokens in one file or several, which are read in place.

    Attributes:
        fingerprint: A digest that changes with the documents and the tokenizer.
        vocab: The number of tokens that the tokenizer has; None where nobody knows.
    """

    def __init__(self, parts: Sequence[np.ndarray[Any, Any]], fingerprint: str, vocab: int | None):
        self.fingerprint, self.vocab = fingerprint, vocab
        self._parts = [part for part in parts if len(part)]
        self._ends = list(accumulate(len(part) for part in self._parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, count: int) -> np.ndarray[Any, Any]:
        """So many tokens from a position on, as int32."""
        pieces, number = [], bisect_right(self._ends, start)
        while count > 0:
            begin = start - (self._ends[number] - len(self._parts[number]))
            piece = self._parts[number][begin : begin + count]
            pieces.append(piece)
            start, count, number = start + len(piece), count - len(piece), number + 1
        return np.concatenate(pieces).astype(np.int32)


def read_tokens(data: Data, folder: Path) -> Tokens:
    """The tokens of documents; text is tokenised into a file in a folder, unless that was done before.

    Raises:
        TrainingError: The data or the tokenizer cannot be read, or the file cannot be written.
    """
    files = find_files(data.path)
    if files.are_tokens:
        parts = [_mapped(path, data.dtype) for path in files.paths]
        vocab = None if data.tokenizer is None else _vocab(_load_tokenizer(data.tokenizer)[0])
        return Tokens(parts, files.fingerprint(), vocab)
    encoder = Encoder(data)
    digest = hashlib.sha256(f"{files.fingerprint()}\0{encoder.fingerprint}\0{data.text}".encode()).hexdigest()[:16]
    path = folder / f"{digest}.bin"
    if not path.exists():
        _write(path, encoder, files, data.text)
    return Tokens([_mapped(path, encoder.dtype)], digest, encoder.vocab)


def _mapped(path: Path, dtype: str) -> np.ndarray[Any, Any]:
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise TrainingError(f"{path} has {size} bytes, which are no whole number of {dtype} tokens; name data.dtype")
    return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)


def _write(path: Path, encoder: "Encoder", files: Files, field: str) -> None:
    """Writes the tokens of all documents; the file appears when it is complete."""
    scratch = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb", buffering=_FLUSH) as file:
            for document in read_documents(files, field):
                for tokens in encoder.encode(document):
                    file.write(np.asarray(tokens, encoder.dtype).tobytes())
        scratch.replace(path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        if error.filename not in (None, str(scratch), str(path.parent)):
            raise TrainingError(f"{error.filename} cannot be read: {error.strerror}") from None
        raise TrainingError(f"the tokens cannot be written to {path.parent}: {error.strerror}") from None
    except TrainingError:
        scratch.unlink()
        raise


class Encoder:
    """Turns text into tokens: bytes, or those of a tokenizer.

    Attributes:
        vocab: The number of tokens there are.
        fingerprint: A digest of how text is turned into tokens.
    """

    def __init__(self, data: Data):
        self._tokenizer: Any = None
        self.vocab, self._end, self.fingerprint = _BYTES, 0, "bytes"
        if data.tokenizer is not None:
            self._tokenizer, path = _load_tokenizer(data.tokenizer)
            self.vocab = _vocab(self._tokenizer)
            self._end = _end_token(self._tokenizer, path, data.end)
            self.fingerprint = f"{hashlib.sha256(path.read_bytes()).hexdigest()} {self._end}"
        elif data.end is not None:
            raise TrainingError("data.end names a token, and bytes have none; give data.tokenizer, or leave it out")

    @property
    def dtype(self) -> str:
        """The smallest type that holds every token."""
        return next(kind for kind in ("uint8", "uint16", "uint32") if self.vocab - 1 <= np.iinfo(kind).max)

    def encode(self, document: Iterator[bytes]) -> Iterator[Any]:
        """The tokens of a document, its end included, in pieces."""
        for piece in document:
            if self._tokenizer is None:
                yield np.frombuffer(piece, np.uint8)
            else:
                yield self._tokenizer.encode(piece.decode("utf-8", "replace"), add_special_tokens=False).ids
        yield [self._end]


def _vocab(tokenizer: Any) -> int:
    """One more than the largest token: numbers may be left out."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _load_tokenizer(given: str) -> tuple[Any, Path]:
    """A tokenizer, and its file."""
    path = Path(given).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise TrainingError(f"there is no tokenizer {path}; give a tokenizer.json, or a folder that holds one")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise TrainingError("data.tokenizer needs tokenizers, which is not installed: pip install tokenizers") from None
    try:
        return Tokenizer.from_file(str(path)), path
    except Exception as error:  # the library raises nothing narrower
        raise TrainingError(f"the tokenizer {path} cannot be read: {str(error).splitlines()[0]:.200}") from None


def _end_token(tokenizer: Any, path: Path, given: str | None) -> int:
    """The token that ends a document: as given, or as the file beside the tokenizer says."""
    text = given
    with suppress(OSError, ValueError, AttributeError):
        found = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
        text = given or (found.get("content") if isinstance(found, dict) else found)
    if not isinstance(text, str):
        raise TrainingError(f"nothing says which token of {path} ends a document; name it in data.end")
    number = tokenizer.token_to_id(text)
    if number is None:
        raise TrainingError(f"the tokenizer {path} has no token {text!r}, which is to end documents; name another")
    return int(number)
