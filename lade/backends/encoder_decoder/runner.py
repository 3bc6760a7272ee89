"""Run the decoder of an encoder-decoder model over token trees: encoder outputs, cache and runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from lade.backends.encoder_decoder.position_patches import DecoderPatches
from lade.decoding.loop import PromptLogitsHook
from lade.model.facts import CACHE, ModelFacts
from lade.model.kv_cache import RowCache, TreeCache
from lade.model.masks import Inputs, MaskPlan
from lade.model.runner import EagerRunner


@dataclass(frozen=True)
class Encoded:
    """The encoder's output for B rows.

    Attributes:
        outputs: model output of the encoder, the hidden states `[B, T, H]` first.
        mask: `[B, T]`, true for states that are not padding; None if there is no padding. Whisper passes a mask of the
            whole audio even with segments of it, which its decoder ignores: a mask of other than B rows is left alone.
    """

    outputs: Any
    mask: torch.Tensor | None = None

    @classmethod
    @torch.no_grad()
    def run(cls, model: PreTrainedModel, input_ids: torch.Tensor) -> Encoded:
        """Run the encoder on ids `[B, T]` without padding."""
        encoder: Any = model.get_encoder()
        return cls(encoder(input_ids=input_ids, return_dict=True))

    @property
    def states(self) -> torch.Tensor:
        """Hidden states, `[B, T, H]`."""
        states: torch.Tensor = self.outputs[0]
        return states

    def __len__(self) -> int:
        """Return B, the number of rows."""
        return self.states.shape[0]

    def rows(self, numbers: Sequence[int]) -> Encoded:
        """Return these rows, in this order; a row may be repeated."""
        if list(numbers) == list(range(len(self))):
            return self
        rows = torch.tensor(numbers, device=self.states.device)
        outputs = BaseModelOutput(last_hidden_state=self.states[rows])
        mask = self.mask
        if mask is not None and len(mask) == len(self):
            mask = mask[rows.to(mask.device)]
        return Encoded(outputs, mask)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `model.forward` for these rows."""
        arguments: dict[str, Any] = {"encoder_outputs": self.outputs}
        if self.mask is not None:
            arguments["attention_mask"] = self.mask
        return arguments


class DecoderCache(TreeCache):
    """Keys and values of self-attention, as in any `TreeCache`, and those of cross-attention alongside.

    Attributes:
        cross: cross-attention keys and values, computed once per row.
        encoded: encoder outputs of these rows; None before prefill.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cross = DynamicCache()
        self.encoded: Encoded | None = None

    def pair(self) -> EncoderDecoderCache:
        """Return both caches as the model expects them; it computes entries that `cross` lacks."""
        return EncoderDecoderCache(self, self.cross)

    def dynamic_pair(self) -> EncoderDecoderCache:
        """Return both caches as plain decoding leaves them; requires rows of equal length."""
        own, rows, length = DynamicCache(), len(self.lengths), max(self.lengths)
        for number, layer in enumerate(self.layers):
            assert layer.keys is not None and layer.values is not None
            own.update(layer.keys[:rows, :, :length], layer.values[:rows, :, :length], number)
        return EncoderDecoderCache(own, self.cross)

    def reset(self) -> None:
        """Drop all rows."""
        super().reset()
        self.cross, self.encoded = DynamicCache(), None

    def leave(self, row: int) -> None:
        """Evict a row; the last row takes its index."""
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


class EncoderDecoderRunner(EagerRunner):
    """One call of `model.forward` per step, on a `DecoderCache`; see `EagerRunner`.

    Args:
        model: an encoder-decoder model that `lade.supports`.
        plan: how its decoder takes its masks.
        generation_config: generation settings, see `EagerRunner`.
        encoded: encoder outputs for the rows of the batch.
        facts: survey of the model, see `EagerRunner`.
    """

    exposes_states = False

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
        """Return an empty cache, to which rows of encoder outputs can be added."""
        return DecoderCache()

    def new_cache(self, *, tokens: int | None = None, limit: int | None = None) -> RowCache:
        """See `EagerRunner.new_cache`."""
        return self.tree_cache()

    @torch.no_grad()
    def prefill(
        self, rows: Sequence[Sequence[int]], cache: TreeCache, hook: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """Feed the decoder's prompts, mostly of one token each.

        Args:
            rows: prompts of equal length, one per row of the encoder outputs. If there are more, as in a calibration of
                batches, encoder rows are reused from the first one on.
            cache: an empty `DecoderCache`.
            hook: unused, since a decoder's prompt carries no information about the text.

        Returns:
            Logits of each row's last token, `[B, V]`.
        """
        assert isinstance(cache, DecoderCache)
        cache.encoded = self._encoded.rows([number % len(self._encoded) for number in range(len(rows))])
        ids = torch.tensor(rows, device=self.device)
        kwargs = {**cache.encoded.arguments(), CACHE: cache.pair(), "use_cache": True}
        try:
            output = self.model._prefill(ids, self.generation_config, kwargs)
        except BaseException:  # layers may differ in their number of tokens
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
            CACHE: cache.pair(),
            "use_cache": True,
            "return_dict": True,
        }
        if "decoder_position_ids" in self._accepts:
            arguments["decoder_position_ids"] = inputs.positions
        return arguments
