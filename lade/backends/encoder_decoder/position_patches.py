"""Patches for decoders that count cache slots where a tree counts positions.

- Tables of positions, learned or sinusoidal (Bart, Marian), are read from the number of cached tokens on.
- Tables that skip padding (M2M100) count from there, too.
- Relative biases (T5) go by the distance between the slots of query and key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lade.errors import UnsupportedModelError
from lade.model.config import Positions
from lade.model.masks import Inputs
from lade.model.slot_patches import SlotPatches
from lade.model.thread_patches import Override, overridden

_OF_TABLES = {"past_key_values_length", "position_ids"}
_OF_COUNTS = ("input_ids", "padding_idx", "past_key_values_length")
_OF_BIASES = ("query_length", "key_length", "device", "past_seen_tokens")


class DecoderPatches(SlotPatches):
    """Patches the parts of one decoder that count slots.

    Args:
        model: an encoder-decoder model; its encoder is left alone.
    """

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
        """Where tables end that cannot grow; relative biases end nowhere."""
        lengths = {table.num_embeddings - getattr(table, "offset", 0) for table in self._tables}
        return Positions(tuple(sorted(lengths)))

    @contextmanager
    def patched_for(self, inputs: Inputs) -> Iterator[None]:
        """While the context lasts, they use the positions in `inputs` when this thread calls them.

        Raises:
            UnsupportedModelError: one was not called, or not by this thread.
        """
        with ExitStack() as stack:
            patches = [_read_by_position(table, inputs.positions) for table in self._tables]
            patches += [_counted_by_position(table, inputs.positions) for table in self._counting]
            patches += [_biased_by_position(layer, inputs) for layer in self._biased]
            overrides = [stack.enter_context(patch) for patch in patches]
            yield
            if not all(override.used for override in overrides):
                raise UnsupportedModelError(
                    "its layers were not called by the thread that decodes, and do not see a tree's positions",
                    "call the model as it is, or use plain model.generate",
                )


def _is_table(module: Any) -> bool:
    return isinstance(module, nn.Embedding) and set(inspect.signature(type(module).forward).parameters) > _OF_TABLES


def _counts_tokens(module: Any) -> bool:
    count = getattr(type(module), "create_position_ids_from_input_ids", None)
    return count is not None and tuple(inspect.signature(count).parameters) == _OF_COUNTS


def _has_bias(module: Any) -> bool:
    if not getattr(module, "has_relative_attention_bias", False) or not hasattr(module, "compute_bias"):
        return False
    return tuple(inspect.signature(type(module).compute_bias).parameters)[1:] == _OF_BIASES


def _read_by_position(table: Any, positions: torch.Tensor) -> AbstractContextManager[Override]:
    """The table's rows of `positions`, `[B, S]`, whatever it is asked for."""

    def own(read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(input_ids: Any, past_key_values_length: int = 0, position_ids: Any = None) -> torch.Tensor:
            rows = read(input_ids, 0, position_ids=positions.flatten().to(table.weight.device))  # its own offset added
            return rows.view(*positions.shape, -1)

        return forward

    return overridden(table, "forward", own)


def _counted_by_position(table: Any, positions: torch.Tensor) -> AbstractContextManager[Override]:
    """The table's rows of `positions`, `[B, S]`, and the one of padding."""

    def own(count: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def create_position_ids(input_ids: torch.Tensor, padding_idx: int, past_key_values_length: Any = 0) -> Any:
            rows = positions.to(input_ids.device) + padding_idx + 1
            return rows.masked_fill(input_ids == padding_idx, padding_idx)

        return create_position_ids

    return overridden(table, "create_position_ids_from_input_ids", own)


def _biased_by_position(layer: Any, inputs: Inputs) -> AbstractContextManager[Override]:
    """The layer's bias of each query and key, `[B, H, S, K]`, by the distance between their positions."""

    def own(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def compute_bias(query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0) -> Any:
            distances = inputs.positions[:, :, None] - inputs.key_positions[:, None, :]  # [B, S, K]
            distances = distances.clamp(min=0).to(device)  # what comes after a query is masked
            farthest = key_length - 1  # no position is beyond its slot
            by_distance = compute(1, key_length, device=device, past_seen_tokens=farthest)[0, :, 0].flip(-1)  # [H, K]
            return by_distance[:, distances].transpose(0, 1)

        return compute_bias

    return overridden(layer, "compute_bias", own)
