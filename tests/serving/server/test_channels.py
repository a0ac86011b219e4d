"""Answers in channels: what is the answer, what is a thought, and no mark is shown."""

import pytest
import tokenizers

from meshwright.hf.tokenizer import Tokenizer
from meshwright.serving.server.channels import Channels
from meshwright.serving.server.text import BYTE_OF_LETTER

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
THOUGHT = "<|channel|>analysis<|message|>Hm — 2?<|end|>"
ASKED = "<|start|>user<|message|>1+1?<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(dict(BYTE_OF_LETTER), []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(list(MARKS))
    return Tokenizer(tmp_path_factory.mktemp("marked"), inner, "", {})


def told(tokenizer, answer, asked=ASKED):
    channels = Channels(tokenizer, tokenizer.encode(asked))
    pieces = [*map(channels.feed, tokenizer.encode(answer)), channels.flush()]
    assert not any("\N{REPLACEMENT CHARACTER}" in part for piece in pieces for part in piece)
    return tuple(map("".join, zip(*pieces, strict=True)))


@pytest.mark.parametrize(
    "answer, expected",
    [
        (f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>2 é<|return|>", ("2 é", "Hm — 2?")),
        ("<|channel|>final<|message|>2", ("2", "")),
        ("<|message|>2", ("2", "")),
        ("<|channel|>commentary to=functions.add <|message|>{}<|call|>", ("", "{}")),
        ("<|channel|>analysis<|message|>Hm", ("", "Hm")),
        ("<|channel|>fin", ("", "")),
    ],
)
def test_the_answer_is_what_the_final_channel_says(of_bytes, answer, expected):
    assert told(of_bytes, answer) == expected


def test_a_template_may_begin_the_message(of_bytes):
    assert told(of_bytes, "2<|return|>", f"{ASKED}<|channel|>final<|message|>") == ("2", "")


def test_only_tokenizers_with_all_marks_have_channels(of_bytes, tokenizer):
    assert Channels.known_to(of_bytes) and not Channels.known_to(tokenizer)
