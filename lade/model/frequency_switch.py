"""Where plain decoding of a longrope model drops its cache: the length at which all frequencies change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lade.model.kv_cache import TreeCache


class FrequencySwitch:
    """What transformers does at the switch of one model.

    Args:
        model: its `prepare_inputs_for_generation` is asked.
        length: tokens beyond which other frequencies are used; None where they never change.
        device: where ids are fed in.
    """

    def __init__(self, model: Any, length: int | None, device: torch.device) -> None:
        self._model, self._length, self._device = model, length, device

    def recomputes(self, rows: Sequence[Sequence[int]], cache: TreeCache) -> bool:
        """Whether plain decoding drops the cache here and computes the text with new frequencies."""
        if self._length is None or not cache.get_seq_length():
            return False
        return self._prepared(torch.tensor(rows, device=self._device), cache).get("past_key_values") is None

    def drops_cache_wrongly(self) -> bool:
        """Whether plain decoding drops the cache at the switch and feeds the last token only, as if it were the text.

        Transformers up to 5.19 does that with Phi3; later versions feed the whole text again.
        """
        if self._length is None:
            return False
        ids = torch.zeros(1, self._length + 1, dtype=torch.long, device=self._device)
        prepared = self._prepared(ids, TreeCache.of_length(self._length))
        return prepared.get("past_key_values") is None and prepared["input_ids"].shape != ids.shape

    def _prepared(self, ids: torch.Tensor, cache: TreeCache) -> dict[str, Any]:
        prepared: dict[str, Any] = self._model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=1,
            past_key_values=cache,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.arange(ids.shape[1], device=ids.device).expand_as(ids),
            use_cache=True,
        )
        return prepared
