"""What the server and its worker say to each other."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.serving.requests import Sampling, Stats, Token

Packed = tuple[int, tuple[tuple[int, float | None, tuple[tuple[int, float], ...]], ...], str | None, int, str]


@dataclass(frozen=True)
class Recipe:
    """The server's first word: how the worker makes its engine.

    Attributes:
        factory: A function that returns it, as "module:function".
        options: Its arguments by name.
    """

    factory: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Submit:
    """From the server: a request, under a number of the server's."""

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Cancel:
    """From the server: nobody waits for this request any more."""

    number: int


@dataclass(frozen=True)
class CannotLoad:
    """From the worker: the model cannot be loaded, for a reason that the user can correct."""

    message: str


@dataclass(frozen=True)
class Ready:
    """From the worker: the model is loaded and everything is compiled.

    Attributes:
        max_len: The most tokens of a sequence, its prompt included.
        most_open: The most requests that the engine takes, in its batch and in its queue.
        vocab: The number of tokens that the model knows.
    """

    max_len: int
    most_open: int
    vocab: int


@dataclass(frozen=True)
class Refused:
    """From the worker: the engine did not take a request."""

    number: int
    error: MeshwrightError


class News(NamedTuple):
    """From the worker: a request was taken, its new tokens, and why it ended if it did."""

    number: int
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None
    cached_tokens: int = 0
    error: str = ""

    def packed(self) -> Packed:
        """The same as plain tuples, which go through a socket twenty times faster: a step has one for each sequence."""
        tokens = tuple((token.id, token.logprob, token.top) for token in self.tokens)
        return self.number, tokens, self.finish_reason, self.cached_tokens, self.error


def unpacked(row: Packed) -> News:
    """What was packed."""
    number, tokens, reason, cached_tokens, error = row
    return News(number, tuple(Token(*token) for token in tokens), reason, cached_tokens, error)


@dataclass(frozen=True)
class Report:
    """From the worker: all that is new, and how the engine does."""

    refused: tuple[Refused, ...]
    news: tuple[Packed, ...]
    stats: Stats
