"""Runs the decoder of an unmodified encoder-decoder model over token trees; the encoder has run before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from lade.decoding.loop import PromptLogitsHook
from lade.model.encoder_decoder.cache import DecoderCache
from lade.model.encoder_decoder.encoded import Encoded
from lade.model.encoder_decoder.position_patches import DecoderPatches
from lade.model.facts import ModelFacts
from lade.model.kv_cache import TreeCache
from lade.model.masks import Inputs, MaskPlan
from lade.model.row_cache import RowCache
from lade.model.runner import EagerRunner


class EncoderDecoderRunner(EagerRunner):
    """One call of `model.forward` per step, on a `DecoderCache`; see `EagerRunner`.

    Args:
        model: an encoder-decoder model that `lade.supports`.
        plan: how its decoder takes its masks.
        generation_config: as for `EagerRunner`.
        encoded: the encoder's output for the rows of the batch.
        facts: see `EagerRunner`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: MaskPlan,
        generation_config: GenerationConfig,
        encoded: Encoded,
        facts: ModelFacts | None = None,
    ) -> None:
        super().__init__(model, plan, generation_config, facts)
        self._encoded = encoded
        self._slot_patches = patches = DecoderPatches(model)
        self.positions = patches.positions

    def tree_cache(self) -> TreeCache:
        """An empty cache that rows of the encoder's output can be added to."""
        return DecoderCache()

    def new_cache(self, *, tokens: int | None = None, limit: int | None = None) -> RowCache:
        """See `EagerRunner`."""
        return self.tree_cache()

    @torch.no_grad()
    def prefill(
        self, rows: Sequence[Sequence[int]], cache: TreeCache, hook: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """Feed the decoder's prompts, mostly of one token each.

        Args:
            rows: equally long. They belong to the rows of the encoder's output; where they are more, as when the cost
                of a batch is measured, these are taken again from the first one on.
            cache: an empty `DecoderCache`.
            hook: is not called: a decoder's prompt tells nothing about the text.

        Returns:
            Logits of each row's last token, `[B, V]`.
        """
        assert isinstance(cache, DecoderCache)
        cache.encoded = self._encoded.rows([number % len(self._encoded) for number in range(len(rows))])
        ids = torch.tensor(rows, device=self.device)
        kwargs = {**cache.encoded.arguments(), "past_key_values": cache.pair(), "use_cache": True}
        try:
            output = self.model._prefill(ids, self.generation_config, kwargs)
        except BaseException:  # some layers hold tokens that others lack
            cache.reset()
            raise
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _arguments(self, inputs: Inputs, cache: Cache, offsets: torch.Tensor | None) -> dict[str, Any]:
        """See `EagerRunner`; a decoder's positions have no offsets."""
        assert isinstance(cache, DecoderCache) and cache.encoded is not None
        arguments = cache.encoded.arguments() | {
            "decoder_input_ids": inputs.ids,
            "decoder_attention_mask": self.plan.masks(inputs, self._dtype),
            "past_key_values": cache.pair(),
            "use_cache": True,
            "return_dict": True,
        }
        if "decoder_position_ids" in self._accepts:
            arguments["decoder_position_ids"] = inputs.positions
        return arguments
