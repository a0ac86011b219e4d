"""A request as its client asked for it: how its tokens are drawn, and what is returned for each."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from meshwright.serving.engine.programs import Parcel
from meshwright.serving.handle import Handle
from meshwright.serving.models import Draw, Drawn, Kind
from meshwright.serving.models.sampling import HELD, MOST_TOKENS
from meshwright.serving.models.shaping import Shape
from meshwright.serving.requests import Sampling, Token
from meshwright.serving.scheduling import Request


@dataclass
class Client:
    """One open request.

    Attributes:
        handle: Where its tokens go.
        sampling: How they are drawn.
        stops: All tokens that end it.
        send: Is given the keys and values of the prompt, which another engine goes on with.
        parcel: What another engine has computed of it, until it is in the cache.
        begun: How many tokens of its text another engine has drawn.
        kind: What a draw must do for it.
        shape: How it changes scores, if it does.
    """

    handle: Handle
    sampling: Sampling
    stops: frozenset[int]
    send: Callable[[Parcel], None] | None = None
    parcel: Parcel | None = None
    begun: int = 0
    kind: Kind = field(init=False)
    shape: np.ndarray | None = field(init=False, default=None)
    _row: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        asked = self.sampling
        seed = secrets.randbits(64) if asked.seed is None else asked.seed
        held = tuple(sorted(self.stops)) if asked.min_tokens else ()
        top_k = min(asked.top_k, MOST_TOKENS)
        row = Draw.row(0, seed, asked.temperature, top_k, asked.top_p, asked.min_p, held)
        self._row = np.array(row, np.int32)
        self.kind = Kind.DRAWN if asked.temperature else Kind.GREEDY
        if asked.temperature and (asked.top_k or asked.top_p < 1 or asked.min_p):
            self.kind = Kind.FILTERED
        if asked.logprobs:
            self.kind = Kind.LISTED
        if asked.shapes_scores:
            self.kind, self.shape = Kind.SHAPED, Shape.row(asked)

    def fill(self, line: np.ndarray, slot: int, index: int) -> None:
        """Writes how the token number `index` is drawn into a line of `Draw.blank`."""
        line[0], line[1:] = slot, self._row
        line[1] = index
        if index >= self.sampling.min_tokens:
            line[HELD] = 0

    def history(self, request: Request) -> tuple[list[int], list[int]]:
        """All tokens of its prompt, and those of its text."""
        prompt, border = list(request.prompt or ()), request.num_prompt - self.begun
        return prompt[:border], prompt[border:] + request.generated

    def ends(self, token: int, index: int) -> bool:
        """Whether a token is the last one."""
        return token in self.stops and index + 1 >= self.sampling.min_tokens

    def token(self, drawn: Drawn, row: int) -> Token:
        """A token with what the client asked to know about it."""
        number, asked = int(drawn.tokens[row]), self.sampling.logprobs
        if asked is None:
            return Token(number)
        top = zip(drawn.top_tokens[row, :asked].tolist(), drawn.top_logprobs[row, :asked].tolist(), strict=True)
        return Token(number, float(drawn.logprobs[row]), tuple(top) if asked else ())
