"""The tokenizer of the embedded model: byte-level BPE, trained on the corpus, and the corpus in its ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lade.errors import InputError
from training.corpus import Document

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2

# A word takes the space, dot, underscore or bracket before it along; a line end takes the next line's indentation
# along but for the last space; a blank line before unindented text is one piece.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+(?=\S)|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class EncodedCorpus:
    """All documents as one array of ids, each ended by EOS: `ids` [total tokens], `ends` and `repeats` [documents]."""

    ids: NDArray[np.uint16]
    ends: NDArray[np.int64]
    repeats: NDArray[np.int64]
    sources: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        """Write to `path`, atomically."""
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, ids=self.ids, ends=self.ends, repeats=self.repeats, sources=np.array(self.sources))
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> EncodedCorpus:
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            return cls(arrays["ids"], arrays["ends"], arrays["repeats"], tuple(map(str, arrays["sources"])))


def train_tokenizer(texts: Iterable[str], vocab_tokens: int, context_tokens: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of `vocab_tokens` ids that puts BOS in front of what it encodes.

    Raises InputError if there is no room for every byte.
    """
    if vocab_tokens < 256 + PAD_ID + 1:
        raise InputError(
            f"vocab_tokens={vocab_tokens}: must be at least {256 + PAD_ID + 1}, the bytes and BOS, EOS, PAD"
        )
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_tokens,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=context_tokens,
        clean_up_tokenization_spaces=False,
    )


def encode_corpus(
    tokenizer: PreTrainedTokenizerFast, documents: list[Document], sources: tuple[str, ...] = ()
) -> EncodedCorpus:
    """Return the ids of all documents, without BOS, each followed by EOS; `sources` says where they came from."""
    batch = tokenizer.backend_tokenizer.encode_batch([d.text for d in documents], add_special_tokens=False)
    rows = [np.array([*encoding.ids, EOS_ID], dtype=np.uint16) for encoding in batch]
    ends = np.cumsum([len(row) for row in rows])
    return EncodedCorpus(np.concatenate(rows), ends, np.array([d.repeats for d in documents]), sources)
