"""Answers as OpenAI's clients read them, whole and in events."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from meshwright.hf.tokenizer import Tokenizer
from meshwright.serving.requests import Token
from meshwright.serving.server.asking import Ask
from meshwright.serving.server.generation import Piece
from meshwright.serving.server.text import token_bytes


class Writer:
    """Writes the answer to one request."""

    def __init__(self, ask: Ask, prompts: Sequence[tuple[int, ...]], model: str, tokenizer: Tokenizer):
        self._ask, self._tokenizer = ask, tokenizer
        kind = "chat.completion" if ask.is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if ask.is_chat else 'cmpl'}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._echoes = [self._echo(number, tokens) for number, tokens in enumerate(prompts)] if ask.echo else []
        self._offsets: dict[int, int] = {}

    def whole(self, pieces: Sequence[Piece], choices: int, usage: Mapping[str, object]) -> dict[str, Any]:
        """The answer in one."""
        answers = []
        for number in range(choices):
            own = [piece for piece in pieces if piece.choice == number]
            text = "".join(piece.text for piece in own)
            tokens = [token for piece in own for token in piece.tokens]
            end = {"finish_reason": own[-1].finish_reason if own else "length"}
            if self._ask.is_chat:
                thought = "".join(piece.thought for piece in own)
                said = {"role": "assistant", "content": text, "refusal": None, **_thought(thought)}
                answers.append({"index": number, "message": said, "logprobs": self._logprobs(number, tokens), **end})
            else:
                text = self._echo_of(number) + text
                answers.append({"index": number, "text": text, "logprobs": self._logprobs(number, tokens), **end})
        return {**self._head, "choices": answers, "usage": usage}

    def opening(self, choices: int) -> list[str]:
        """The events before the first token."""
        if self._ask.is_chat:
            role = {"role": "assistant", "content": ""}
            return [self._event(number, {"delta": role}, None) for number in range(choices)]
        return [
            self._event(number, {"text": self._echo_of(number)}, None) for number in range(choices) if self._ask.echo
        ]

    def event(self, piece: Piece) -> str:
        """The event of a piece."""
        delta = ({"content": piece.text} if piece.text else {}) | _thought(piece.thought)
        more = {"delta": delta} if self._ask.is_chat else {"text": piece.text}
        return self._event(piece.choice, more, piece.finish_reason, self._logprobs(piece.choice, piece.tokens))

    def closing(self, usage: Mapping[str, object]) -> list[str]:
        """The events after the last token."""
        events = ["data: [DONE]\n\n"]
        if self._ask.include_usage:
            events.insert(0, data_event({**self._stream_head(), "choices": [], "usage": usage}))
        return events

    def _stream_head(self) -> dict[str, Any]:
        return self._head | ({"object": "chat.completion.chunk"} if self._ask.is_chat else {})

    def _event(self, choice: int, more: dict[str, Any], reason: str | None, logprobs: Any = None) -> str:
        answer = {"index": choice, **more, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self._ask.include_usage else {}
        return data_event({**self._stream_head(), "choices": [answer], **usage})

    def _echo(self, number: int, tokens: tuple[int, ...]) -> str:
        text = self._ask.prompts[number].text
        return text or str(self._tokenizer.inner.decode(tokens, skip_special_tokens=not self._ask.special))

    def _echo_of(self, choice: int) -> str:
        return self._echoes[choice // self._ask.n] if self._echoes else ""

    def _logprobs(self, choice: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._ask.logprobs is None:
            return None
        if self._ask.is_chat:
            return {"content": [self._chat_logprob(token) for token in tokens], "refusal": None}
        names = [self._name(token.id) for token in tokens]
        offsets, at = [], self._offsets.get(choice, 0)
        for token in tokens:
            offsets.append(at)
            at += len(token_bytes(self._tokenizer, token.id).decode(errors="replace"))
        self._offsets[choice] = at
        return {
            "tokens": names,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self._name(id): logprob for id, logprob in token.top} for token in tokens],
            "text_offset": offsets,
        }

    def _chat_logprob(self, token: Token) -> dict[str, Any]:
        top = [self._one(id, logprob) for id, logprob in token.top]
        return {**self._one(token.id, token.logprob), "top_logprobs": top}

    def _one(self, id: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._name(id), "logprob": logprob, "bytes": list(token_bytes(self._tokenizer, id))}

    def _name(self, id: int) -> str:
        """A token as text; its bytes where they are no text, as OpenAI writes them, so that no two are the same."""
        content = token_bytes(self._tokenizer, id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _thought(text: str) -> dict[str, str]:
    """Thoughts, where there are any, under the name that vLLM and others give them."""
    return {"reasoning_content": text} if text else {}


def data_event(content: Mapping[str, Any]) -> str:
    """One event of a stream."""
    return f"data: {json.dumps(content, separators=(',', ':'), ensure_ascii=False)}\n\n"
