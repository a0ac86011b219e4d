"""From tokens to text as it grows: no character is split, and nothing of a stop string is shown."""

from collections.abc import Sequence

from meshwright.hf.tokenizer import Tokenizer

#: Tokens before the first new one that are decoded with it, since some tokenizers drop a space at the beginning.
_CONTEXT = 5
#: So many tokens are decoded together before the oldest are left out.
_WINDOW = 16
#: What decoders show for bytes that are no character, or the beginning of one: at most three, since four are whole.
_BROKEN, _MOST_BROKEN = "\N{REPLACEMENT CHARACTER}", 3


class Detokenizer:
    """The text of a growing sequence, piece by piece.

    A character may be spread over several tokens; until the last one is there, decoders show marks of replacement at
    the end of the text, which are held back.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], special: bool = False):
        self._inner, self._special = tokenizer.inner, special
        self._ids = list(prompt[-_CONTEXT:])
        text = self._decode()
        self._shown = len(text) - _broken(text)  # of the window's text

    def feed(self, token: int) -> str:
        """The text that one more token makes sure of; often all of its own."""
        self._ids.append(token)
        text = self._decode()
        broken = _broken(text)
        sure = max(len(text) - broken, self._shown)
        piece, self._shown = text[self._shown : sure], sure
        if len(self._ids) > (4 * _WINDOW if broken else _WINDOW):  # an endless run of broken bytes is cut, too
            del self._ids[:-_CONTEXT]
            self._shown = len(self._decode()) - broken
        return piece

    def flush(self) -> str:
        """What was held back, when no more tokens will come."""
        return self._decode()[self._shown :]

    def _decode(self) -> str:
        return str(self._inner.decode(self._ids, skip_special_tokens=not self._special))


def _broken(text: str) -> int:
    """How many marks of replacement at a text's end may become a character yet."""
    return min(len(text) - len(text.rstrip(_BROKEN)), _MOST_BROKEN)


class StopStrings:
    """Looks for strings that end a text, across the borders of its pieces.

    Attributes:
        matched: The string that was met; None before.
    """

    def __init__(self, strings: Sequence[str], include: bool = False):
        self.matched: str | None = None
        self._strings, self._include = tuple(strings), include
        self._longest = max(map(len, strings), default=0)
        self._held = ""

    def feed(self, piece: str) -> str:
        """The text that may be shown now: not what a stop string may have begun with."""
        if not self._strings:
            return piece
        text, self._held = self._held + piece, ""
        matches = [(at, string) for string in self._strings if (at := text.find(string)) >= 0]
        if matches:
            at, self.matched = min(matches)
            return text[: at + len(self.matched) * self._include]
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(string.startswith(text[-size:]) for string in self._strings):
                self._held = text[-size:]
                return text[:-size]
        return text

    def flush(self) -> str:
        """What was held back, when the text has ended otherwise."""
        held, self._held = self._held, ""
        return held


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes that a token stands for, which need not be whole characters."""
    name = tokenizer.inner.id_to_token(token) or ""
    text = str(tokenizer.inner.decode([token], skip_special_tokens=False))
    if _BROKEN not in text:
        return text.encode()
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):  # SentencePiece's way to write a byte
        return bytes([int(name[3:5], 16)])
    if all(mark in BYTE_OF_LETTER for mark in name):
        return bytes(BYTE_OF_LETTER[mark] for mark in name)
    return text.encode()


def _byte_letters() -> dict[str, int]:
    """The letters by which GPT-2's vocabulary, and all after it, write bytes: printable ones as themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


#: The byte that each letter of such a vocabulary stands for.
BYTE_OF_LETTER = _byte_letters()
