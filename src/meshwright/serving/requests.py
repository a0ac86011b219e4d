"""What a client asks of an engine, what comes back token by token, and how an engine refuses."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

from meshwright.errors import MeshwrightError, ServingError

#: The most likely tokens that may be asked for beside each token; OpenAI's own limit.
MOST_LOGPROBS = 20
#: The most tokens whose scores a request may change by `logit_bias`; OpenAI's own limit.
MOST_FAVOURS = 300


class Overloaded(ServingError):
    """The queue is full: the request was not taken, and may be sent again later.

    Attributes:
        retry_after_s: After how many seconds it is worth trying again.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStopped(MeshwrightError, RuntimeError):
    """The engine has ended, or is ending, while requests were open."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen, and when it ends.

    Attributes:
        max_tokens: The most tokens to generate.
        min_tokens: No token ends the text before there are so many.
        temperature: 0 takes the likeliest token.
        top_k: Only so many of the likeliest tokens are drawn from; 0 means all.
        top_p: Only the likeliest tokens that together have this probability are drawn from.
        min_p: Only tokens that are at least so many times as likely as the likeliest one are drawn.
        seed: Requests with the same seed and prompt get the same tokens; None draws one.
        logprobs: For how many of the likeliest tokens, beside the one taken, the logarithm of the probability is given;
            None gives no probabilities at all.
        stop_token_ids: Tokens that end the text, beside the model's own.
        ignore_eos: Whether the model's own token of the end is a token like any other.
        presence_penalty: Taken from the scores of tokens that were generated.
        frequency_penalty: Taken from them for each time.
        repetition_penalty: By which the scores of tokens that were generated or are in the prompt are divided, or
            multiplied where they are negative.
        logit_bias: What is added to the scores of some tokens: pairs of a token and a number.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_tokens", "min_tokens", "top_k", "seed", "logprobs"):
            value = getattr(self, name)
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            _check(name, value, whole or (value is None and name in ("seed", "logprobs")), "a whole number")
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            value = getattr(self, name)
            _check(name, value, isinstance(value, Real) and not isinstance(value, bool), "a number")
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _check("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens")
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "a number from 0")
        _check("top_k", self.top_k, self.top_k >= 0, "at least 1, or 0 for all tokens")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1")
        for name, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            _check(f"{name}_penalty", value, -2 <= value <= 2, "between -2 and 2")
        rate = self.repetition_penalty
        _check("repetition_penalty", rate, 0 < rate < math.inf, "a number above 0, 1 for none")
        many = len(self.logit_bias)
        _check("the number of tokens in logit_bias", many, many <= MOST_FAVOURS, f"at most {MOST_FAVOURS}")
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0 <= self.logprobs <= MOST_LOGPROBS, f"between 0 and {MOST_LOGPROBS}")

    @property
    def shapes_scores(self) -> bool:
        """Whether scores are changed before a token is drawn."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.logit_bias)


def _check(name: str, value: object, legal: bool, text: str) -> None:
    if not legal:
        raise ServingError(f"{name} is {value!r}; give {text}")


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        id: Its number.
        logprob: The logarithm of its probability, None where it was not asked for.
        top: The likeliest tokens at its place with the same of each, the likeliest first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Stats:
    """How an engine does at one moment; counts grow from its start.

    Attributes:
        running: Requests in the batch.
        waiting: Requests in the queue.
        slots: The most requests in the batch.
        blocks_used: Blocks of the cache that requests use.
        blocks: All blocks of the cache.
        tokens_in: Tokens of prompts that were let in.
        prefix_hits: How many of these were found in the cache.
        tokens_out: Tokens generated.
        preemptions: How often a request gave up its blocks.
        steps: Steps so far.
        step_s: The time of a step, averaged over the last ones.
    """

    running: int
    waiting: int
    slots: int
    blocks_used: int
    blocks: int
    tokens_in: int
    prefix_hits: int
    tokens_out: int
    preemptions: int
    steps: int
    step_s: float
