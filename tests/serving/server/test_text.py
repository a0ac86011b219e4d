"""Text as it grows: whole characters, and nothing of a stop string."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from meshwright.hf.tokenizer import Tokenizer
from meshwright.serving.server.text import Detokenizer, StopStrings, token_bytes
from tests.serving.server.running import ids


def pieces(tokenizer, tokens, prompt=()):
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.flush()]


@given(text=st.text(max_size=40), prompt=st.text(max_size=9))
def test_characters_are_never_split(tokenizer, text, prompt):
    parts = pieces(tokenizer, ids(text), ids(prompt))
    assert "".join(parts) == text
    assert all(part == "" or part in text for part in parts)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert all("\N{REPLACEMENT CHARACTER}" not in part for part in parts)


def test_a_character_comes_with_its_last_byte(tokenizer):
    assert pieces(tokenizer, ids("aé€😀")) == ["a", "", "é", "", "", "€", "", "", "", "😀", ""]


@given(tokens=st.lists(st.integers(3, 258), max_size=120))
def test_any_bytes_give_the_same_text_as_at_once(tokenizer, tokens):
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_bytes_that_are_no_text_do_not_wait_for_ever(tokenizer):
    parts = pieces(tokenizer, [0x80 + 3] * 200)
    assert "".join(parts[:-1]) == "\N{REPLACEMENT CHARACTER}" * 197


def test_spaces_of_sentencepiece_stay():
    vocab = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "!": 3, "<0xE2>": 4, "<0x82>": 5, "<0xAC>": 6}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    inner.decoder = tokenizers.decoders.Sequence([*parts, tokenizers.decoders.Strip(" ", 1, 0)])
    tokenizer = Tokenizer(None, inner, "", {})
    assert pieces(tokenizer, [1, 2, 3, 4, 5, 6, 2]) == ["Hello", " world", "!", "", "", "€", " world", ""]
    assert pieces(tokenizer, [2, 3], prompt=[1]) == [" world", "!", ""]
    assert token_bytes(tokenizer, 4) == b"\xe2"


def test_the_bytes_of_a_token(tokenizer):
    assert b"".join(token_bytes(tokenizer, token) for token in ids("é€ a")) == "é€ a".encode()
    assert token_bytes(tokenizer, 0) == b"</s>"


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=30, max_size=30),
)
def test_stop_strings_are_found_across_pieces(text, stops, sizes):
    finder, shown, left = StopStrings(stops), "", text
    for size in sizes:
        shown += finder.feed(left[:size])
        left = left[size:]
        if finder.matched or not left:
            break
    if not finder.matched:
        shown += finder.flush()
    at = min((text.find(stop) for stop in stops if stop in text), default=None)
    assert (finder.matched is not None) == (at is not None)
    if at is None:
        assert shown == text
    else:
        assert text.startswith(shown) and all(stop not in shown for stop in stops)


@pytest.mark.parametrize(("include", "shown"), [(False, "ab"), (True, "abcd")])
def test_a_stop_string_may_be_shown(include, shown):
    finder = StopStrings(["cd"], include)
    assert finder.feed("abc") + finder.feed("de") == shown
    assert finder.matched == "cd"
