"""Run the decoder of an encoder-decoder model over token trees: encoder states, cache, runner."""

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
from lade.model.facts import ModelFacts
from lade.model.kv_cache import RowCache, TreeCache
from lade.model.masks import Inputs, MaskPlan
from lade.model.runner import EagerRunner


@dataclass(frozen=True)
class Encoded:
    """The encoder's output for B rows.

    Attributes:
        outputs: what it returned, the hidden states `[B, T, H]` first.
        mask: `[B, T]`, which of the states are no padding; None where none is. Whisper, whose decoder looks at none, is
            given that of all sounds also with the segments of some: one of other than B rows stays as it is.
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
        """`[B, T, H]`, the hidden states."""
        states: torch.Tensor = self.outputs[0]
        return states

    def __len__(self) -> int:
        """B."""
        return self.states.shape[0]

    def rows(self, numbers: Sequence[int]) -> Encoded:
        """Only these rows, in this order; a row may occur twice."""
        if list(numbers) == list(range(len(self))):
            return self
        rows = torch.tensor(numbers, device=self.states.device)
        outputs = BaseModelOutput(last_hidden_state=self.states[rows])
        mask = self.mask
        if mask is not None and len(mask) == len(self):
            mask = mask[rows.to(mask.device)]
        return Encoded(outputs, mask)

    def arguments(self) -> dict[str, Any]:
        """The arguments of `forward` for these rows."""
        arguments: dict[str, Any] = {"encoder_outputs": self.outputs}
        if self.mask is not None:
            arguments["attention_mask"] = self.mask
        return arguments


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
