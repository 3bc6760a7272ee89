"""Texts as token ids; one that is too long for the model by its characters alone is refused before it is tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lade.server.token_text import byte_alphabet

_KEEP = frozenset("NFD NFKD Lowercase Prepend ByteLevel Metaspace Digits UnicodeScripts FixedLength".split())  # noqa: SIM905
"""Parts of tokenizers that leave each character as one at least."""
_STRIP = frozenset("Strip Whitespace WhitespaceSplit BertPreTokenizer".split())  # noqa: SIM905
"""Those that leave spaces out."""
_COMPOSED = {"NFC": 4, "NFKC": 4}
"""Characters that they make one of: a letter and three marks, in Greek."""


class TextTooLongError(Exception):
    """A text that has more tokens than the model takes, whichever they are.

    Args:
        tokens: that it has at least.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the text has {tokens} tokens at least")
        self.tokens = tokens


@dataclass(frozen=True)
class Span:
    """How much of a text a token stands for.

    Attributes:
        characters: at most.
        skips_spaces: whether any number of spaces may come on top.
    """

    characters: int
    skips_spaces: bool = False

    def least_tokens(self, text: str) -> int:
        """How many tokens a text has at least."""
        length = sum(map(len, text.split())) if self.skips_spaces else len(text)
        return -(-length // self.characters)


class TextEncoder:
    """Encodes texts as a model's prompts. Several threads may do so at a time.

    Args:
        tokenizer: of transformers; nobody else calls it for truncated or padded texts.
        context: tokens that the model takes; None for no limit.
    """

    def __init__(self, tokenizer: Any, context: int | None) -> None:
        tokenizer("")  # the first call takes back what truncates and pads; a later one that did would disturb others
        self._tokenizer, self._context = tokenizer, context
        self.span = span_of(tokenizer)

    def check(self, text: str) -> None:
        """Raise `TextTooLongError` for a text that leaves no room for an answer, as far as its length tells."""
        if self._context is None or self.span is None:
            return
        least = self.span.least_tokens(text)
        if least >= self._context:
            raise TextTooLongError(least)

    def ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Of all of it; raises like `check`."""
        self.check(text)
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def first_ids(self, text: str) -> list[int]:
        """Of its beginning, as many as the model takes, without special tokens."""
        if self._context is not None and self.span is not None:
            text = text[: self._context * self.span.characters]
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids[: self._context]


def span_of(tokenizer: Any) -> Span | None:
    """How much of a text a token of a tokenizer can stand for; None where it may be any number of characters.

    A token's name is as long as its text, or longer: of bytes it has a letter for each.
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
    """Of a normalizer or a pre-tokenizer, which may be a sequence of some."""
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
    """Whether each byte of an unknown word is a token; else all of it may be one, or none."""
    if any(part["type"] == "ByteLevel" for part in parts):
        return byte_alphabet().keys() <= vocabulary.keys()
    falls_back = getattr(model, "byte_fallback", False)
    return falls_back and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
