"""Single tokens as text and as bytes: a character may be spread over several."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenText:
    """The text and the bytes of single tokens.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        kind = "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False)
        self._byte_level, self._spaced = "ByteLevel" in kind, "▁" in kind
        self._bytes = byte_alphabet() if self._byte_level else {}

    def text(self, token: int) -> str:
        """Of a token alone; a part of a character is a replacement mark, a special token its name."""
        if token in self._special:
            return str(self._tokenizer.convert_ids_to_tokens(token))
        return self.bytes(token).decode(errors="replace")

    def bytes(self, token: int) -> bytes:
        """What it adds to a text; a special token adds nothing."""
        if token in self._special:
            return b""
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if self._byte_level and all(letter in self._bytes for letter in name):
            return bytes(self._bytes[letter] for letter in name)
        if self._spaced:
            found = _BYTE.fullmatch(name)
            return bytes([int(found[1], 16)]) if found else name.replace("▁", " ").encode()
        return str(self._tokenizer.decode([token])).encode()

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token as OpenAI's API lists it."""
        return {"token": self.text(token), "logprob": finite(logprob), "bytes": list(self.bytes(token))}


class TextOffsets:
    """Where the tokens of a text begin in it, in characters, as they come.

    Args:
        spelling: of the tokens.

    Attributes:
        end: of the text so far.
    """

    def __init__(self, spelling: TokenText) -> None:
        self._spelling, self.end = spelling, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")

    def take(self, tokens: Iterable[int]) -> list[int]:
        """Of the next ones."""
        found = []
        for token in tokens:
            found.append(self.end)
            self.end += len(self._decoder.decode(self._spelling.bytes(token)))
        return found


def finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, -9999.0)


def byte_alphabet() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes with (openai/gpt-2, encoder.py)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
