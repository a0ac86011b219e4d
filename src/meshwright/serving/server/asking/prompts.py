"""Prompts as texts, as tokens or as conversations, and the tokens that the model reads."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from meshwright.errors import CheckpointError
from meshwright.hf.tokenizer import Tokenizer
from meshwright.serving.server.asking.fields import Fields
from meshwright.serving.server.refusals import Refusal

_MOST_MESSAGES = 10_000
_RESERVED = frozenset(("answer", "messages", "self"))  # arguments of `Tokenizer.chat`
#: Texts from this length on are tokenised beside the event loop, which would halt for a millisecond or more.
_LONG = 4_000


@dataclass(frozen=True)
class Prompt:
    """One prompt; one of `text`, `tokens` and `messages` is what the client gave.

    Attributes:
        text: As text.
        tokens: As numbers of tokens.
        messages: As a conversation, each message with `role` and `content`.
        variables: What else the template of conversations is told.
        special: Whether the tokenizer adds its own special tokens to a text.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] | None = None
    special: bool = True


def read_prompts(fields: Fields, vocab: int) -> tuple[Prompt, ...]:
    """The field `prompt`: a text, numbers of tokens, or a list of either."""
    value, special = fields.value("prompt"), fields.flag("add_special_tokens", default=True)
    if value is None:
        raise Refusal(HTTPStatus.BAD_REQUEST, "prompt is missing; give a text", "prompt", "missing_field")
    if isinstance(value, str) or (isinstance(value, list) and value and not isinstance(value[0], str | list)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise fields.wrong("prompt", "a text, numbers of tokens, or a list of either")
    prompts = []
    for one in value:
        if isinstance(one, str):
            prompts.append(Prompt(text=fields.checked_text("prompt", one), special=special))
        else:
            prompts.append(Prompt(tokens=fields.tokens("prompt", one, vocab)))
    return tuple(prompts)


def read_messages(fields: Fields) -> Prompt:
    """The field `messages` of a conversation, and what its template is told."""
    value = fields.value("messages")
    if value is None:
        raise Refusal(
            HTTPStatus.BAD_REQUEST, "messages is missing; give a list of messages", "messages", "missing_field"
        )
    if not isinstance(value, list) or not 1 <= len(value) <= _MOST_MESSAGES:
        raise fields.wrong("messages", f"a list of 1 to {_MOST_MESSAGES} messages")
    variables: dict[str, Any] = dict(fields.table("chat_template_kwargs").left())
    if not _RESERVED.isdisjoint(variables):
        raise fields.wrong("chat_template_kwargs", f"no {' and no '.join(sorted(_RESERVED))} in it")
    if fields.value("reasoning_effort") is not None:  # models that know it read it in their template
        variables["reasoning_effort"] = fields.text("reasoning_effort")
    answer = fields.flag("add_generation_prompt", default=True)
    return Prompt(messages=tuple(map(_message, value)), variables=variables | {"answer": answer})


def _message(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        message = "messages: each is an object with role and content"
        raise Refusal(HTTPStatus.BAD_REQUEST, message, "messages", "invalid_value")
    fields = Fields(value, "messages.")
    fields.text("role")
    content = value.get("content")
    if isinstance(content, list):
        content = "".join(_part(part) for part in content)
    return {**value, "content": None if content is None else fields.checked_text("content", content)}


def _part(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        message = "messages.content has a part that is no text; this server takes texts only"
        raise Refusal(HTTPStatus.BAD_REQUEST, message, "messages", "invalid_value")
    return Fields(part, "messages.content.").text("text")


async def tokenise(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a prompt."""
    tokens = prompt.tokens
    if not tokens:
        size = len(prompt.text) + sum(len(message["content"] or "") for message in prompt.messages)
        tokens = await asyncio.to_thread(_tokens, prompt, tokenizer) if size > _LONG else _tokens(prompt, tokenizer)
    if not tokens:
        raise Refusal(HTTPStatus.BAD_REQUEST, "the prompt is empty; give at least one token", "prompt", "invalid_value")
    return tokens


def _tokens(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not prompt.messages:
        return tuple(tokenizer.encode(prompt.text, prompt.special))
    if not tokenizer.template:
        message = "this model has no template of conversations; use /v1/completions"
        raise Refusal(HTTPStatus.BAD_REQUEST, message, "messages", "no_chat_template")
    try:
        text = tokenizer.chat(prompt.messages, **(prompt.variables or {}))
    except CheckpointError as error:
        raise Refusal(HTTPStatus.BAD_REQUEST, str(error), "messages", "invalid_value") from None
    return tuple(tokenizer.encode(text, special=False))
