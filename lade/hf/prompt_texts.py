"""What of the prompts of a batch is text: the columns that plain decoding's mask lets the model see.

    input_ids        0  0  5  9  7        -  -  -          embeddings instead of ids
    attention_mask   0  0  1  0  1        1  1  1
    text                   5     7        0  0  0          any id stands for an embedding

Padding on the left and gaps are no text. Processors and criteria are shown the columns as they were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lade.errors import UnsupportedArgumentError
from lade.hf.prepared import Prepared

REMEDY = 'leave it out, use plain model.generate, or lookahead="auto", which falls back to it'
_STAND_IN = 0
"""The id in a text whose embeddings alone are given; it is neither fed nor shown."""


@dataclass(frozen=True)
class PromptTexts:
    """The texts of P prompts.

    Attributes:
        ids: `[P]`, of each text.
        columns: `[P]`, those that it stands in, ascending.
        width: L, columns that plain decoding prefills.
        shown: columns that processors are shown: L, or 0 where there are embeddings alone.
    """

    ids: Sequence[list[int]]
    columns: Sequence[Sequence[int]]
    width: int
    shown: int

    @classmethod
    def of(cls, prepared: Prepared) -> PromptTexts:
        """Those of a decoder's prompts.

        Raises:
            UnsupportedArgumentError: the mask or the embeddings are none that ids could stand for.
        """
        prompts, kwargs, embeddings = prepared.prompts, prepared.model_kwargs, prepared.embeddings
        shown = width = prompts.shape[1]
        if embeddings is not None:
            width = embeddings.shape[1]
            if shown not in (0, width):
                _refuse(f"inputs_embeds of {width} columns", f"input_ids have {shown}, and stand for others")
            prompts = prompts if shown else prompts.new_full((len(prompts), width), _STAND_IN)
        mask = kwargs.get("attention_mask")
        columns = _unmasked(prompts, None if mask is None else mask[:: prepared.beams])
        ids = [[row[column] for column in seen] for row, seen in zip(prompts.tolist(), columns, strict=True)]
        return cls(ids, columns, width, shown)

    @classmethod
    def without_padding(cls, prompts: torch.Tensor) -> PromptTexts:
        """Those of prompts `[P, L]` that are text in all columns."""
        width = prompts.shape[1]
        return cls(prompts.tolist(), [range(width)] * len(prompts), width, width)

    def __len__(self) -> int:
        """P."""
        return len(self.ids)

    @property
    def hidden(self) -> list[int]:
        """`[P]`, how many columns more than its text processors are shown of a prompt; fewer are less than 0."""
        return [self.shown - len(text) for text in self.ids]

    @property
    def padding(self) -> int:
        """Columns that the model does not see of the shortest text."""
        return self.width - min(map(len, self.ids))

    @property
    def has_gaps(self) -> bool:
        """Whether columns are masked after others that are not."""
        return any(list(seen) != list(range(self.width - len(seen), self.width)) for seen in self.columns)


def _unmasked(prompts: torch.Tensor, attention_mask: torch.Tensor | None) -> list[Sequence[int]]:
    """The columns that each row of `[P, L]` shows, given its mask `[P, L]` of 0 and 1, or None for all."""
    rows, width = prompts.shape
    if attention_mask is None:
        return [range(width)] * rows
    if attention_mask.shape != prompts.shape:
        _refuse(f"an attention_mask of shape {list(attention_mask.shape)}", "it must have one column a token")
    columns: list[Sequence[int]] = []
    for mask in attention_mask.tolist():
        if not any(mask):
            _refuse("an attention_mask of zeros", "there is no text to continue")
        if not mask[-1]:
            _refuse("an attention_mask that ends with 0", "plain decoding then begins after padding on the right")
        columns.append([column for column, seen in enumerate(mask) if seen])
    return columns


def _refuse(what: str, why: str) -> None:
    raise UnsupportedArgumentError(f"{what} cannot be used with lookahead decoding: {why}", REMEDY)
