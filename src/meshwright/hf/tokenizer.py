"""The tokenizer of a model, `tokenizer.json`, and the template by which it writes conversations."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.errors import CheckpointError
from meshwright.hf.files import read_json

FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class Tokenizer:
    """Text to the numbers of tokens and back.

    Attributes:
        path: The folder it was read from.
        inner: The `tokenizers.Tokenizer`.
        template: The template of conversations, in Jinja's language; "" if there is none.
        special: Special tokens by name, such as `bos_token`, which templates use.
    """

    path: Path
    inner: Any
    template: str
    special: Mapping[str, str]

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The numbers of the tokens of a text; `special` says whether the tokenizer adds its own, such as the first."""
        return list(self.inner.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens."""
        return str(self.inner.decode([int(number) for number in ids]))

    def chat(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True, **variables: Any) -> str:
        """A conversation as the model was trained to read it; tokenise it with `special=False`.

        Args:
            messages: Each with `role` and `content`.
            answer: Whether it ends where the model's answer begins.
            **variables: What else the template asks for, such as `tools`.
        """
        if not self.template:
            raise CheckpointError(f"{self.path} has no template of conversations; write the text by yourself")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
        environment.filters["tojson"] = _json
        given = {**self.special, "messages": list(messages), "add_generation_prompt": answer, **variables}
        try:
            return environment.from_string(self.template).render(given)
        except Exception as error:  # a template runs operations of its own on whatever the messages hold
            name = self.path.resolve().name  # without the folders around it, since clients of a server read this
            raise CheckpointError(f"the template of conversations of {name} failed: {error}") from None


def _refuse(message: str) -> None:
    """What templates call for conversations that they do not take."""
    raise TemplateError(message)


def _json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as templates expect it: Jinja's own filter writes letters of HTML in codes."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def read_tokenizer(folder: Path, vocab: int | None = None) -> Tokenizer:
    """Reads a folder's tokenizer, which must be one for so many tokens."""
    path = folder / FILE
    if not path.exists():
        raise CheckpointError(f"{folder} has no {FILE}; download it, or save the tokenizer as fast with transformers")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{path} cannot be read ({error}); download it again") from None
    largest = max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
    if vocab is not None and largest >= vocab:
        raise CheckpointError(
            f"{path} has tokens up to number {largest}, and the model's vocabulary has {vocab}; it is the tokenizer of "
            "another model"
        )
    settings = read_json(folder / SETTINGS, "tokenizer") if (folder / SETTINGS).exists() else {}
    special = {name: text for name in settings if name.endswith("_token") and (text := _text(settings[name]))}
    return Tokenizer(folder, inner, _template(folder, settings), special)


def _text(token: Any) -> str:
    """A special token, which settings give as text or as a dictionary."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _template(folder: Path, settings: dict[str, Any]) -> str:
    if (folder / TEMPLATE).exists():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    found = settings.get("chat_template") or ""
    if isinstance(found, list):  # several, by name
        found = {one["name"]: one["template"] for one in found}.get("default", "")
    return str(found)
