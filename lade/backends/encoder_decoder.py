"""The encoder-decoder backend: token trees in the decoder, with the encoder's output computed once.

Some decoders derive positions from cache slots, which differ from positions in a tree, and are patched:

- Position embeddings, learned or sinusoidal (Bart, Marian), are indexed from the number of cached tokens on.
- Position embeddings that skip padding (M2M100) count from there as well.
- Relative position biases (T5) use the distance between the slots of query and key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from lade.backends.slots import SlotPatches
from lade.decoding.loop import PromptLogitsHook
from lade.model.config import Positions, token_embeddings
from lade.model.facts import CACHE, ModelFacts
from lade.model.inputs import Inputs, MaskPlan
from lade.model.kv_cache import TreeCache
from lade.model.module_changes import Override, overridden
from lade.model.prepared import ENCODERS, Prepared
from lade.model.runner import ENCODED_RUNNERS, EagerRunner

_CACHE_LENGTH = f"{CACHE}_length"
_TABLE_PARAMETERS = {_CACHE_LENGTH, "position_ids"}
_COUNT_PARAMETERS = ("input_ids", "padding_idx", _CACHE_LENGTH)
_BIAS_PARAMETERS = ("query_length", "key_length", "device", "past_seen_tokens")


class DecoderPatches(SlotPatches):
    """Patches the modules of one decoder that derive positions from slots; the encoder is left alone."""

    _enough = staticmethod(all)

    def __init__(self, model: PreTrainedModel) -> None:
        modules: list[Any] = list(model.get_decoder().modules())
        self._tables = [module for module in modules if _is_table(module)]
        self._counting = [module for module in modules if _counts_tokens(module)]
        self._biased = [module for module in modules if _has_bias(module)]

    def __bool__(self) -> bool:
        """See `SlotPatches`."""
        return bool(self._tables or self._counting or self._biased)

    @property
    def positions(self) -> Positions:
        """Ends of position tables that cannot grow; relative biases have none."""
        lengths = {table.num_embeddings - getattr(table, "offset", 0) for table in self._tables}
        return Positions(tuple(sorted(lengths)))

    def _patches(self, inputs: Inputs) -> list[AbstractContextManager[Override]]:
        patches = [_read_by_position(table, inputs.positions) for table in self._tables]
        patches += [_counted_by_position(table, inputs.positions) for table in self._counting]
        return patches + [_biased_by_position(layer, inputs) for layer in self._biased]


def _is_table(module: Any) -> bool:
    if not isinstance(module, nn.Embedding):
        return False
    return set(inspect.signature(type(module).forward).parameters) > _TABLE_PARAMETERS


def _counts_tokens(module: Any) -> bool:
    count = getattr(type(module), "create_position_ids_from_input_ids", None)
    return count is not None and tuple(inspect.signature(count).parameters) == _COUNT_PARAMETERS


def _has_bias(module: Any) -> bool:
    if not getattr(module, "has_relative_attention_bias", False) or not hasattr(module, "compute_bias"):
        return False
    return tuple(inspect.signature(type(module).compute_bias).parameters)[1:] == _BIAS_PARAMETERS


def _read_by_position(table: Any, positions: torch.Tensor) -> AbstractContextManager[Override]:
    """Patch a table to return the rows of `positions`, `[B, S]`, whatever ids it is called with."""

    def patch(read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(input_ids: Any, *_: Any, **__: Any) -> torch.Tensor:  # the length of the cache, and positions
            rows = read(input_ids, 0, position_ids=positions.flatten().to(table.weight.device))  # adds its patch offset
            return rows.view(*positions.shape, -1)

        return forward

    return overridden(table, "forward", patch)


def _counted_by_position(table: Any, positions: torch.Tensor) -> AbstractContextManager[Override]:
    """Patch a table to use `positions`, `[B, S]`, and the padding row for padding."""

    def patch(count: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def create_position_ids(input_ids: torch.Tensor, padding_idx: int, *_: Any, **__: Any) -> Any:
            rows = positions.to(input_ids.device) + padding_idx + 1
            return rows.masked_fill(input_ids == padding_idx, padding_idx)

        return create_position_ids

    return overridden(table, "create_position_ids_from_input_ids", patch)


def _biased_by_position(layer: Any, inputs: Inputs) -> AbstractContextManager[Override]:
    """Patch a layer to compute its bias of queries and keys, `[B, H, S, K]`, from the distance of their positions."""

    def patch(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def compute_bias(query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0) -> Any:
            distances = inputs.positions[:, :, None] - inputs.key_positions[:, None, :]  # [B, S, K]
            distances = distances.clamp(min=0).to(device)  # keys after a query are masked
            farthest = key_length - 1  # positions never exceed slots
            by_distance = compute(1, key_length, device=device, past_seen_tokens=farthest)[0, :, 0].flip(-1)  # [H, K]
            return by_distance[:, distances].transpose(0, 1)

        return compute_bias

    return overridden(layer, "compute_bias", patch)


@dataclass(frozen=True)
class Encoded:
    """The encoder's output for B rows.

    Whisper passes a mask of the whole audio even with segments of it, which its decoder ignores: a mask of other than B
    rows is left alone.
    """

    outputs: Any  # model output of the encoder, the hidden states [B, T, H] first
    mask: torch.Tensor | None = None  # [B, T], true for states that are not padding; None if there is no padding

    @classmethod
    @torch.no_grad()
    def run(cls, model: PreTrainedModel, input_ids: torch.Tensor) -> Encoded:
        """Run the encoder on ids `[B, T]` without padding."""
        encoder: Any = model.get_encoder()
        return cls(encoder(input_ids=input_ids, return_dict=True))

    def __len__(self) -> int:
        """Return B, the number of rows."""
        return len(self.outputs[0])

    def rows(self, numbers: Sequence[int]) -> Encoded:
        """Return these rows, in this order; a row may be repeated."""
        if list(numbers) == list(range(len(self))):
            return self
        states: torch.Tensor = self.outputs[0]  # [B, T, H]
        rows = torch.tensor(numbers, device=states.device)
        outputs = BaseModelOutput(last_hidden_state=states[rows])
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
    """Keys and values of self-attention, as in any `TreeCache`, and those of cross-attention alongside."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = DynamicCache()  # computed once per row
        self.encoded: Encoded | None = None  # encoder outputs of these rows; None before prefill

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
    """One call of `model.forward` per step, on a `DecoderCache`, with encoder outputs for the rows of the batch."""

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

    @torch.no_grad()
    def prefill(
        self, rows: Sequence[Sequence[int]], cache: TreeCache, hook: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """Feed the decoder's prompts of equal length, mostly of one token each; return logits of their ends, `[B, V]`.

        If there are more than rows of encoder outputs, as in a calibration of batches, these are reused from the first
        one on. The hook is unused, since a decoder's prompt carries no information about the text.
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


def runner_on_encoded(prepared: Prepared, plan: MaskPlan) -> EncoderDecoderRunner:
    """Return the runner for the encoder outputs of a prepared generation, with one row per prompt."""
    kwargs, beams = prepared.model_kwargs, prepared.beams
    encoded = Encoded(kwargs["encoder_outputs"], kwargs.get("attention_mask"))
    if beams > 1:
        encoded = encoded.rows(range(0, len(encoded), beams))
    return EncoderDecoderRunner(prepared.model, plan, prepared.generation_config, encoded, prepared.facts)


def source_of(prepared: Prepared, number: int) -> list[int]:
    """Return the encoder's input ids for one row, without padding; empty if they are not tokens of the decoder."""
    inputs = prepared.inputs_tensor
    if inputs is None or inputs.ndim != 2 or torch.is_floating_point(inputs):
        return []
    if not _share_vocabulary(prepared.model):
        return []
    repeats = len(prepared.input_ids) // len(inputs)  # beams, or several sequences per prompt
    ids, mask = inputs[number // repeats], prepared.model_kwargs.get("attention_mask")
    if mask is not None:
        ids = ids[mask[number].to(ids.device) != 0]
    vocabulary = token_embeddings(prepared.model).weight.shape[0]
    return ids.tolist() if ids.numel() and int(ids.min()) >= 0 and int(ids.max()) < vocabulary else []


def _share_vocabulary(model: Any) -> bool:
    """Return True if encoder and decoder use the same token ids, judging by their embeddings."""
    encoder, decoder = model.get_encoder().get_input_embeddings(), model.get_decoder().get_input_embeddings()
    if getattr(model.config, "share_encoder_decoder_embeddings", None) is False:
        return False
    return encoder is not None and encoder.weight.shape == decoder.weight.shape


class EncoderDecoderBackend:
    """Token trees in the decoder of an encoder-decoder model, see `lade.model.registry`."""

    source_of = staticmethod(source_of)
    runner_on_encoded = staticmethod(runner_on_encoded)


BACKEND = EncoderDecoderBackend()
ENCODERS.fill(BACKEND)
ENCODED_RUNNERS.fill(BACKEND)
