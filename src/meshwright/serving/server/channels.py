"""Answers in channels, as gpt-oss writes conversations (https://github.com/openai/harmony): thoughts, then the answer.

An answer is a row of messages, each `<|channel|>name<|message|>text<|end|>`. What the channel `final` says is the
answer; the others, `analysis` and `commentary`, are thoughts, which clients get as `reasoning_content`.
"""

from collections.abc import Sequence

from meshwright.hf.tokenizer import Tokenizer
from meshwright.serving.server.text import Detokenizer

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_FINAL = "final"


class Channels:
    """The text of a growing answer in channels, piece by piece, as a detokenizer makes it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._start, self._channel, self._message = map(tokenizer.inner.token_to_id, (_START, _CHANNEL, _MESSAGE))
        self._ends = {tokenizer.inner.token_to_id(name) for name in _ENDS}
        self._header: list[int] | None = []  # of the message that begins; None while there is text
        self._detokenizer = Detokenizer(tokenizer, ())
        self._is_final = False
        tail = list(prompt)
        begun = len(tail) - 1 - tail[::-1].index(self._start) if self._start in tail else len(tail)
        for token in tail[begun + 1 :]:  # a template may begin the message
            self.feed(token)

    @classmethod
    def known_to(cls, tokenizer: Tokenizer) -> bool:
        """Whether a tokenizer has the marks of channels."""
        return None not in map(tokenizer.inner.token_to_id, (_START, _CHANNEL, _MESSAGE, *_ENDS))

    def feed(self, token: int) -> tuple[str, str]:
        """The text of the answer and of thoughts that one more token makes sure of."""
        if token in self._ends:
            ended = self.flush()
            self._header = []
            return ended
        if token == self._message:
            self._is_final = self._name() == _FINAL
            self._header, self._detokenizer = None, Detokenizer(self._tokenizer, ())
            return "", ""
        if self._header is not None:
            self._header.append(token)
            return "", ""
        return self._told(self._detokenizer.feed(token))

    def flush(self) -> tuple[str, str]:
        """What was held back, when a message or the answer ends."""
        return self._told(self._detokenizer.flush() if self._header is None else "")

    def _told(self, text: str) -> tuple[str, str]:
        return (text, "") if self._is_final else ("", text)

    def _name(self) -> str:
        """The first word behind the mark of the channel; what follows says to whom the message is."""
        header = self._header or []
        marked = header[header.index(self._channel) + 1 :] if self._channel in header else []
        words = self._tokenizer.decode(marked).split()
        return words[0] if words else _FINAL
