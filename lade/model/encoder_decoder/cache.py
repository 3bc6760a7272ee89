"""The KV cache of a decoder that attends to an encoder: a tree of its own tokens, and what is fixed for each row."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from lade.model.encoder_decoder.encoded import Encoded
from lade.model.kv_cache import TreeCache


class DecoderCache(TreeCache):
    """Keys and values of self-attention, as in any `TreeCache`; those of cross-attention go along with their rows.

    Attributes:
        cross: keys and values that the layers have computed of the encoder's states, once for each row.
        encoded: the encoder's states of these rows; None before prefill.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cross = DynamicCache()
        self.encoded: Encoded | None = None

    def pair(self) -> EncoderDecoderCache:
        """Both as the model takes them; it computes what `cross` does not hold yet."""
        return EncoderDecoderCache(self, self.cross)

    def dynamic_pair(self) -> EncoderDecoderCache:
        """Both as plain decoding leaves them; all rows are equally long."""
        own, rows, length = DynamicCache(), len(self.lengths), max(self.lengths)
        for number, layer in enumerate(self.layers):
            assert layer.keys is not None and layer.values is not None
            own.update(layer.keys[:rows, :, :length], layer.values[:rows, :, :length], number)
        return EncoderDecoderCache(own, self.cross)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.cross, self.encoded = DynamicCache(), None

    def leave(self, row: int) -> None:
        """Evict a row; the last one takes its place and its number."""
        numbers = list(range(len(self.lengths)))
        numbers[row] = numbers[-1]
        super().leave(row)
        self._select(numbers[:-1])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        super().batch_select_indices(indices)
        self._select(indices.tolist())

    def _select(self, numbers: list[int]) -> None:
        if self.encoded is None:
            return
        self.encoded = self.encoded.rows(numbers)
        layers: list[Any] = self.cross.layers
        for layer in layers:
            if layer.keys is not None:
                layer.batch_select_indices(torch.tensor(numbers, device=layer.keys.device))
