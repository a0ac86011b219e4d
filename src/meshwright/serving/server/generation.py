"""The answers to one request as they grow: every choice its tokens, its text, and why it ended."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from meshwright.hf.tokenizer import Tokenizer
from meshwright.serving.requests import EngineStopped, Token
from meshwright.serving.server.asking import Ask
from meshwright.serving.server.channels import Channels
from meshwright.serving.server.messages import News, Ready
from meshwright.serving.server.metrics import Metrics
from meshwright.serving.server.process import Ticket, Worker
from meshwright.serving.server.text import Detokenizer, StopStrings


@dataclass(frozen=True)
class Piece:
    """What is new of one choice.

    Attributes:
        choice: Which one.
        text: More text; often empty while a character or a stop string may be on its way.
        thought: More of what the model thinks before it answers, where it says so.
        tokens: The tokens since the last piece of the choice, for their probabilities.
        finish_reason: Why it ended, if it did: "stop" or "length".
    """

    choice: int
    text: str
    thought: str
    tokens: tuple[Token, ...]
    finish_reason: str | None


@dataclass
class _Choice:
    """One answer, with what turns its tokens into text."""

    ask: Ask
    detokenizer: Detokenizer | Channels
    stops: StopStrings
    began_s: float
    ticket: Ticket | None = None
    num_tokens: int = 0
    cached_tokens: int = 0
    first_s: float | None = None
    finish_reason: str | None = None
    tokens: list[Token] = field(default_factory=list)

    def feed(self, news: News) -> tuple[str, str]:
        """The text and the thoughts that some news bring; they end it where a stop string is met."""
        parts, thoughts = [], []
        for token in news.tokens:
            self.num_tokens += 1
            self.tokens.append(token)
            part, thought = _both(self.detokenizer.feed(token.id))
            thoughts.append(thought)
            if self.num_tokens > self.ask.sampling["min_tokens"]:
                part = self.stops.feed(part)
            parts.append(part)
            if self.stops.matched is not None:
                self.finish_reason = "stop"
                return "".join(parts), "".join(thoughts)
        if news.finish_reason is not None:
            part, thought = _both(self.detokenizer.flush())
            parts += self.stops.feed(part), self.stops.flush()
            thoughts.append(thought)
            self.finish_reason = "stop" if self.stops.matched is not None else news.finish_reason
        return "".join(parts), "".join(thoughts)


def _both(made: str | tuple[str, str]) -> tuple[str, str]:
    """Text and thoughts; where there are no channels all is text."""
    return (made, "") if isinstance(made, str) else made


class Generation:
    """All answers to one request, which came at `began_s`.

    Attributes:
        prompts: The tokens of each prompt.
    """

    def __init__(
        self, ask: Ask, prompts: Sequence[tuple[int, ...]], began_s: float, tokenizer: Tokenizer, metrics: Metrics
    ):
        self.ask, self.prompts = ask, tuple(prompts)
        self._metrics, self._news = metrics, asyncio.Queue[tuple[int, News]]()
        in_channels = ask.is_chat and not ask.special and Channels.known_to(tokenizer)
        self._choices = [
            _Choice(
                ask,
                Channels(tokenizer, prompt) if in_channels else Detokenizer(tokenizer, prompt, ask.special),
                StopStrings(ask.stop, ask.include_stop),
                began_s,
            )
            for prompt in self.prompts
            for _ in range(ask.n)
        ]

    @property
    def usage(self) -> dict[str, object]:
        """How many tokens there are by now, as OpenAI writes it."""
        prompt, answer = sum(map(len, self.prompts)), sum(choice.num_tokens for choice in self._choices)
        cached = sum(choice.cached_tokens for choice in self._choices[:: self.ask.n])  # each prompt counts once
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @property
    def num_choices(self) -> int:
        """How many answers there are."""
        return len(self._choices)

    async def submit(self, worker: Worker, engine: Ready) -> None:
        """Hands all choices to the engine; returns when it has taken them all."""
        plans = []
        for number, choice in enumerate(self._choices):
            prompt = self.prompts[number // self.ask.n]
            plans.append(
                (number, choice, prompt, self.ask.sampling_for(len(prompt), number % self.ask.n, engine.max_len))
            )
        for number, choice, prompt, sampling in plans:
            choice.ticket = await worker.submit(prompt, sampling, partial(self._receive, number))

    def cancel(self, worker: Worker, reason: str = "cancelled") -> None:
        """Ends what has not ended, because its client has left or for another reason."""
        for choice in self._choices:
            if choice.ticket is not None and choice.finish_reason is None:
                worker.cancel(choice.ticket)
                choice.finish_reason = reason
                self._metrics.ended_early(reason)

    async def pieces(self, worker: Worker) -> AsyncIterator[Piece]:
        """What is new, until all choices have ended.

        Raises:
            EngineStopped: The worker died.
        """
        unfinished = sum(1 for choice in self._choices if choice.ticket is not None)
        if not unfinished:  # only the prompts are to be echoed
            for number in range(len(self._choices)):
                yield Piece(number, "", "", (), "length")
        while unfinished:
            number, news = await self._news.get()
            choice = self._choices[number]
            if choice.finish_reason is not None:  # a stop string was met; this was on its way
                continue
            if news.finish_reason in ("error", "cancelled"):
                self.cancel(worker, "error")
                raise EngineStopped(news.error or "the engine ended the request; it may be sent again")
            text, thought = choice.feed(news)
            choice.cached_tokens = news.cached_tokens
            self._measure(choice)
            if choice.finish_reason is not None:
                unfinished -= 1
                if choice.ticket is not None:
                    worker.cancel(choice.ticket)
            tokens = tuple(choice.tokens) if text or thought or choice.finish_reason else ()
            if tokens:
                choice.tokens.clear()
                yield Piece(number, text, thought, tokens, choice.finish_reason)

    def _receive(self, number: int, news: News) -> None:
        self._news.put_nowait((number, news))

    def _measure(self, choice: _Choice) -> None:
        now = monotonic()
        if choice.first_s is None:
            choice.first_s = now
            self._metrics.first_token(now - choice.began_s)
        if choice.finish_reason is not None:
            self._metrics.finished(choice.finish_reason, choice.num_tokens, now - choice.began_s, now - choice.first_s)
