"""The served model and its tokenizer, and the text and bytes of tokens."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from lade.config import Lookahead
from lade.server.errors import invalid


@dataclass(frozen=True)
class ServedModel:
    """A model, its tokenizer and the sampling defaults of its checkpoint.

    Attributes:
        encode_images: function of messages with images and template arguments, which returns ids and further arguments
            of `generate`; None if the model takes no images.
    """

    model: Any  # a transformers causal language model with a greedy generation_config
    tokenizer: Any  # with the chat template to use, if any
    sampling: Mapping[str, Any] = field(default_factory=dict)  # the checkpoint's, by argument of `model.generate`
    context: int | None = None  # length in tokens; None if unknown
    lookahead: Lookahead = "auto"  # default method of requests
    encode_images: Callable[..., tuple[list[int], Mapping[str, Any]]] | None = None
    save: Callable[[], None] | None = None  # saves draft memories, raising `LadeError` on failure
    close: Callable[[], None] = lambda: None  # called when the server has ended

    @property
    def chat_template(self) -> str:
        """The chat template; "" if there is none."""
        template = getattr(self.tokenizer, "chat_template", None)
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    def ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Thread-safe after the first call."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def check_ids(self, field: str, ids: Collection[int]) -> None:
        """Raise `ApiError`, naming the field, for an id outside the vocabulary."""
        if max(ids, default=0) >= self.vocabulary:
            raise invalid(field, f"token id {max(ids)} is outside the vocabulary: give ids below {self.vocabulary}")

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary; ids below it can be fed."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def ends(self) -> list[int]:
        """Sorted end-of-sequence ids."""
        ends = self.model.generation_config.eos_token_id
        return sorted(ends if isinstance(ends, list) else [] if ends is None else [ends])


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenText:
    """Text and bytes of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        kind = "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False)
        self._byte_level, self._spaced = "ByteLevel" in kind, "▁" in kind
        self._bytes = {letter: byte for byte, letter in bytes_to_unicode().items()} if self._byte_level else {}

    def text(self, token: int) -> str:
        """Return the text of a token: its name if special, with replacement characters if it splits a character."""
        if token in self._special:
            return str(self._tokenizer.convert_ids_to_tokens(token))
        return self.bytes(token).decode(errors="replace")

    def bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; none if special."""
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
        """Return a token in the logprobs format of OpenAI's API."""
        return {"token": self.text(token), "logprob": finite(logprob), "bytes": list(self.bytes(token))}


class TextOffsets:
    """Incremental offsets of tokens in a text, in characters."""

    def __init__(self, token_text: TokenText) -> None:
        self._token_text, self.end = token_text, 0  # the end is the length of the text so far
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")

    def take(self, tokens: Iterable[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        found = []
        for token in tokens:
            found.append(self.end)
            self.end += len(self._decoder.decode(self._token_text.bytes(token)))
        return found


def finite(logprob: float) -> float:
    """Return a logprob that JSON can represent."""
    return max(logprob, -9999.0)
