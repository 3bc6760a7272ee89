"""A served model and its tokenizer: texts as ids, tokens as text and bytes."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lade.config import Lookahead
from lade.model.prepared import ids_of, vocabulary_of
from lade.model.support.supports import unwrap


@dataclass(frozen=True)
class ServedModel:
    """A model, its tokenizer, and what its checkpoint says about choosing tokens.

    Attributes:
        model: a transformers causal language model; its generation_config decodes greedily.
        tokenizer: its tokenizer, with the chat template that is to be used, if any.
        sampling: what its checkpoint says about drawing tokens, by the names of `model.generate`.
        context: tokens it was made for; None where it does not say.
        lookahead: how requests are drafted that do not say.
        encode_images: makes ids, and the other arguments of `generate`, of messages with images, arguments for their
            template, and what is called with their text before that is tokenised; None where it takes none.
        save: keeps what was learned, and raises `LadeError` where it cannot; None where nothing is to be kept.
        close: is called when the server has ended.
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
        """As text; "" where there is none."""
        template = getattr(self.tokenizer, "chat_template", None)
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    @property
    def vocabulary(self) -> int:
        """V: ids below it can be fed."""
        return vocabulary_of(unwrap(self.model))

    @property
    def ends(self) -> list[int]:
        """Ids that end a text."""
        return sorted(ids_of(self.model.generation_config.eos_token_id))


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
