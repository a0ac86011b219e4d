"""The bodies of `/v1/completions` and `/v1/chat/completions`: what is asked, and how much of it is done here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from meshwright.serving.requests import MOST_FAVOURS, MOST_LOGPROBS, Sampling
from meshwright.serving.server.asking.fields import Fields
from meshwright.serving.server.asking.prompts import Prompt, read_messages, read_prompts
from meshwright.serving.server.messages import Ready
from meshwright.serving.server.refusals import Refusal
from meshwright.serving.server.settings import ServerSettings

_MOST_STOPS, _LONGEST_STOP = 16, 256
_SEED_BITS = 63
_REPETITION = 0.01, 100.0
_STRONGEST = 100  # of `logit_bias`
#: What changes nothing of the answer, or is only told to whoever runs the server.
_WITHOUT_EFFECT = frozenset(
    [
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    ]
)
#: What is not done here, with the values that ask for nothing; any other is refused.
_NOT_DONE: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "best_of": (1,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "length_penalty": (1,),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (True, False),
        "prompt_logprobs": (),
        "stream_options.include_obfuscation": (False,),
        "response_format": ({"type": "text"},),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "use_beam_search": (False,),
        "web_search_options": (),
    }
)


@dataclass(frozen=True)
class Ask:
    """One request, checked.

    Attributes:
        is_chat: Whether it goes to `/v1/chat/completions`.
        prompts: What is to be continued.
        n: How many answers to each.
        max_tokens: The most tokens of an answer; None for as many as there is room for.
        sampling: How tokens are chosen, but for `max_tokens` and the seeds of several answers.
        stop: Strings that end an answer.
        include_stop: Whether the string that ended it is part of it.
        special: Whether special tokens are shown in the text.
        echo: Whether the prompt comes before the answer.
        stream: Whether the answer is sent as it grows.
        include_usage: Whether the last event of a stream says how many tokens there were.
    """

    is_chat: bool
    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: int | None
    sampling: Mapping[str, Any]
    stop: tuple[str, ...]
    include_stop: bool
    special: bool
    echo: bool
    stream: bool
    include_usage: bool
    logprobs: int | None = field(default=None)

    def sampling_for(self, prompt_length: int, choice: int, max_len: int) -> Sampling:
        """How the tokens of one answer are chosen."""
        room = max_len - prompt_length
        if room < 1:
            raise Refusal(
                HTTPStatus.BAD_REQUEST,
                f"the prompt has {prompt_length} tokens, and the model takes {max_len} with its answer; shorten it",
                "messages" if self.is_chat else "prompt",
                "context_length_exceeded",
            )
        most = room if self.max_tokens is None else self.max_tokens
        if most > room:
            raise Refusal(
                HTTPStatus.BAD_REQUEST,
                f"max_tokens is {most} and the prompt has {prompt_length} tokens, together {most + prompt_length}; the "
                f"model takes {max_len}",
                "max_tokens",
                "context_length_exceeded",
            )
        options = dict(self.sampling)
        if options["seed"] is not None:
            options["seed"] = _seed(options["seed"], choice)
        return Sampling(max_tokens=most, logprobs=self.logprobs, **options)


def read_completion(content: Mapping[str, Any], settings: ServerSettings, engine: Ready) -> Ask:
    """A body of `/v1/completions`."""
    fields = Fields(content)
    prompts = read_prompts(fields, engine.vocab)
    logprobs, echo = fields.integer("logprobs", None, 0, MOST_LOGPROBS), fields.flag("echo")
    if echo and logprobs is not None:
        raise Refusal(HTTPStatus.BAD_REQUEST, "echo with logprobs is not done here; leave one of them out", "echo")
    max_tokens = fields.integer("max_tokens", 16, 0, engine.max_len)
    if max_tokens == 0 and not echo:
        raise fields.wrong("max_tokens", "at least 1; 0 is for echo")
    return _read(
        fields, settings, engine, is_chat=False, prompts=prompts, logprobs=logprobs, echo=echo, most=max_tokens
    )


def read_chat(content: Mapping[str, Any], settings: ServerSettings, engine: Ready) -> Ask:
    """A body of `/v1/chat/completions`."""
    fields = Fields(content)
    prompt = read_messages(fields)
    top = fields.integer("top_logprobs", None, 0, MOST_LOGPROBS)
    logprobs = (top or 0) if fields.flag("logprobs") else None
    if top is not None and logprobs is None:
        raise fields.wrong("top_logprobs", "it together with logprobs: true")
    older = fields.integer("max_tokens", None, 1, engine.max_len)
    most = fields.integer("max_completion_tokens", older, 1, engine.max_len)
    return _read(fields, settings, engine, is_chat=True, prompts=(prompt,), logprobs=logprobs, echo=False, most=most)


def _read(
    fields: Fields,
    settings: ServerSettings,
    engine: Ready,
    *,
    is_chat: bool,
    prompts: tuple[Prompt, ...],
    logprobs: int | None,
    echo: bool,
    most: int | None,
) -> Ask:
    """What both bodies have."""
    name = fields.text("model", settings.name)
    if name != settings.name:
        message = f"there is no model {name!r:.80}; this server has {settings.name!r}"
        raise Refusal(HTTPStatus.NOT_FOUND, message, "model", "model_not_found")
    n = fields.integer("n", 1, 1, settings.most_choices) or 1
    if n * len(prompts) > settings.most_choices:
        raise fields.wrong("n", f"at most {settings.most_choices} answers to {len(prompts)} prompts together", n)
    top_k = fields.integer("top_k", 0, -1, 2**31)
    tokens = fields.value("stop_token_ids")
    stream = fields.flag("stream")
    options = fields.table("stream_options")
    seed = fields.integer("seed", None, -(2**_SEED_BITS), 2**_SEED_BITS - 1)
    ask = Ask(
        is_chat=is_chat,
        prompts=prompts,
        n=n,
        max_tokens=most,
        sampling={
            "min_tokens": fields.integer("min_tokens", 0, 0, engine.max_len),
            "temperature": fields.number("temperature", 1.0, 0.0, 2.0),
            "top_k": max(top_k or 0, 0),  # vLLM's -1 means all, as 0 does
            "top_p": fields.number("top_p", 1.0, 0.0, 1.0),
            "seed": seed,
            "stop_token_ids": () if tokens is None else fields.tokens("stop_token_ids", tokens, engine.vocab),
            "ignore_eos": fields.flag("ignore_eos"),
            "min_p": fields.number("min_p", 0.0, 0.0, 1.0),
            "presence_penalty": fields.number("presence_penalty", 0.0, -2.0, 2.0),
            "frequency_penalty": fields.number("frequency_penalty", 0.0, -2.0, 2.0),
            "repetition_penalty": fields.number("repetition_penalty", 1.0, *_REPETITION),
            "logit_bias": _favours(fields, engine.vocab),
        },
        stop=_stop(fields),
        include_stop=fields.flag("include_stop_str_in_output"),
        special=not fields.flag("skip_special_tokens", default=True),
        echo=echo,
        stream=stream,
        include_usage=options.flag("include_usage"),
        logprobs=logprobs,
    )
    _refuse_others(fields.left())
    _refuse_others({f"stream_options.{name}": value for name, value in options.left().items()})
    return ask


def _seed(seed: int, choice: int) -> int:
    """The seed of one of several answers: not the next number, which is the first answer's of the next seed."""
    if choice == 0:
        return seed % 2**_SEED_BITS
    return int.from_bytes(blake2b(f"{seed} {choice}".encode(), digest_size=8).digest()) % 2**_SEED_BITS


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    strings = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or len(strings) > _MOST_STOPS:
        raise fields.wrong("stop", f"a text or a list of at most {_MOST_STOPS}")
    for string in strings:
        if not 0 < len(fields.checked_text("stop", string)) <= _LONGEST_STOP:
            raise fields.wrong("stop", f"texts of 1 to {_LONGEST_STOP} characters")
    return tuple(strings)


def _favours(fields: Fields, vocab: int) -> tuple[tuple[int, float], ...]:
    """The field `logit_bias`: an object whose names are numbers of tokens."""
    given = fields.table("logit_bias")
    if len(given.left()) > MOST_FAVOURS:
        raise fields.wrong("logit_bias", f"at most {MOST_FAVOURS} tokens")
    favours = []
    for name in given.left():
        if not (name.isascii() and name.isdigit() and int(name) < vocab):
            raise fields.wrong("logit_bias", f"an object whose names are tokens between 0 and {vocab - 1}")
        favours.append((int(name), given.number(name, 0.0, -_STRONGEST, _STRONGEST)))
    return tuple(dict(favours).items())


def _refuse_others(left: Mapping[str, Any]) -> None:
    for name, value in left.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _NOT_DONE:
            raise Refusal(
                HTTPStatus.BAD_REQUEST, f"there is no field {name!r:.60}; leave it out", name[:60], "unknown_field"
            )
        if value not in _NOT_DONE[name]:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"{name} is not done here; leave it out", name, "unsupported_field")
