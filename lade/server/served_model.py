"""The served model and its tokenizer: encoding of texts, text and bytes of tokens."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lade.config import Lookahead
from lade.model.prepared import ids_of, vocabulary_of
from lade.model.supports import unwrap


@dataclass(frozen=True)
class ServedModel:
    """A model, its tokenizer and the sampling defaults of its checkpoint.

    Attributes:
        model: a transformers causal language model with a greedy generation_config.
        tokenizer: its tokenizer, with the chat template to use, if any.
        sampling: sampling defaults of the checkpoint, by argument of `model.generate`.
        context: context length in tokens; None if unknown.
        lookahead: default method of requests.
        encode_images: function of messages with images, template arguments and a check of the rendered text, which
            returns ids and further arguments of `generate`; None if the model takes no images.
        save: function that saves draft memories, raising `LadeError` on failure; None to save nothing.
        close: called when the server has ended.
    """

    model: Any
    tokenizer: Any
    sampling: Mapping[str, Any] = field(default_factory=dict)
    context: int | None = None
    lookahead: Lookahead = "auto"
    encode_images: Callable[..., tuple[list[int], Mapping[str, Any]]] | None = None
    save: Callable[[], None] | None = None
    close: Callable[[], None] = lambda: None

    @property
    def chat_template(self) -> str:
        """The chat template; "" if there is none."""
        template = getattr(self.tokenizer, "chat_template", None)
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary; ids below it can be fed."""
        return vocabulary_of(unwrap(self.model))

    @property
    def ends(self) -> list[int]:
        """Sorted end-of-sequence ids."""
        return sorted(ids_of(self.model.generation_config.eos_token_id))


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenText:
    """Text and bytes of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        kind = "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False)
        self._byte_level, self._spaced = "ByteLevel" in kind, "▁" in kind
        self._bytes = byte_alphabet() if self._byte_level else {}

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
    """Incremental offsets of tokens in a text, in characters.

    Attributes:
        end: length of the text so far.
    """

    def __init__(self, token_text: TokenText) -> None:
        self._token_text, self.end = token_text, 0
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


def byte_alphabet() -> dict[str, int]:
    """Return the characters that byte-level tokenizers map bytes to (openai/gpt-2, encoder.py)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_KEEP = frozenset("NFD NFKD Lowercase Prepend ByteLevel Metaspace Digits UnicodeScripts FixedLength".split())  # noqa: SIM905
"""Tokenizer components that map each character to at least one."""
_STRIP = frozenset("Strip Whitespace WhitespaceSplit BertPreTokenizer".split())  # noqa: SIM905
"""Tokenizer components that drop spaces."""
_COMPOSED = {"NFC": 4, "NFKC": 4}
"""Maximum number of characters composed to one: a Greek letter and three marks."""


class TextTooLongError(Exception):
    """A text with more tokens than the model accepts, by a lower bound.

    Args:
        tokens: lower bound on the number of tokens.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the text has at least {tokens} tokens")
        self.tokens = tokens


@dataclass(frozen=True)
class Span:
    """Maximum length of text per token.

    Attributes:
        characters: maximum number of characters.
        skips_spaces: True if any number of spaces may be added.
    """

    characters: int
    skips_spaces: bool = False

    def least_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of a text."""
        length = sum(map(len, text.split())) if self.skips_spaces else len(text)
        return -(-length // self.characters)


class TextEncoder:
    """Encodes prompts. Thread-safe.

    Args:
        tokenizer: a transformers tokenizer, which is not used with truncation or padding elsewhere.
        context: maximum number of tokens; None for no limit.
    """

    def __init__(self, tokenizer: Any, context: int | None) -> None:
        tokenizer("")  # resets truncation and padding once, before other threads encode
        self._tokenizer, self._context = tokenizer, context
        self.span = span_of(tokenizer)

    def check(self, text: str) -> None:
        """Raise `TextTooLongError` if the text's length alone shows that it leaves no room for an answer."""
        if self._context is None or self.span is None:
            return
        least = self.span.least_tokens(text)
        if least >= self._context:
            raise TextTooLongError(least)

    def ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; raises like `check`."""
        self.check(text)
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def first_ids(self, text: str) -> list[int]:
        """Return the first ids of a text, at most `context`, without special tokens."""
        if self._context is not None and self.span is not None:
            text = text[: self._context * self.span.characters]
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids[: self._context]


def span_of(tokenizer: Any) -> Span | None:
    """Return the maximum length of text per token; None if unbounded.

    A token's name is at least as long as its text: bytes take a character each.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = [*_parts(backend.normalizer), *_parts(backend.pre_tokenizer)]
    vocabulary = backend.get_vocab()
    if not _spells_all(backend.model, parts, vocabulary):
        return None
    factor, added = 1, tokenizer.added_tokens_decoder.values()
    skips = any(token.lstrip or token.rstrip for token in added)
    for part in parts:
        kind = part["type"]
        skips = skips or kind in _STRIP
        if kind == "Replace":
            kept = len(part["content"])
            if "String" not in part["pattern"] or kept == 0:
                return None
            factor *= -(-len(part["pattern"]["String"]) // kept)
        elif kind in ("Split", "Punctuation"):
            if part["behavior"] == "Removed":
                return None
        elif kind not in _KEEP | _STRIP | _COMPOSED.keys():
            return None
        factor *= _COMPOSED.get(kind, 1)
    return Span(factor * max(map(len, vocabulary)), skips)


def _parts(component: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the components of a normalizer or pre-tokenizer, sequences flattened."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()))


def _flat(described: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if described["type"] != "Sequence":
        yield described
        return
    for name in ("normalizers", "pretokenizers"):
        for part in described.get(name, ()):
            yield from _flat(part)


def _spells_all(model: Any, parts: list[Mapping[str, Any]], vocabulary: Mapping[str, int]) -> bool:
    """Return True if unknown words are encoded as bytes; otherwise one token, or none, may stand for a whole word."""
    if any(part["type"] == "ByteLevel" for part in parts):
        return byte_alphabet().keys() <= vocabulary.keys()
    falls_back = getattr(model, "byte_fallback", False)
    return falls_back and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
