"""Patches for decoders that derive positions from cache slots, which differ from positions in a tree.

- Position embeddings, learned or sinusoidal (Bart, Marian), are indexed from the number of cached tokens on.
- Position embeddings that skip padding (M2M100) count from there as well.
- Relative position biases (T5) use the distance between the slots of query and key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lade.backends.slots import SlotPatches
from lade.errors import UnsupportedModelError
from lade.model.config import Positions
from lade.model.facts import CACHE
from lade.model.masks import Inputs
from lade.model.thread_patches import Override, overridden

_CACHE_LENGTH = f"{CACHE}_length"
_TABLE_PARAMETERS = {_CACHE_LENGTH, "position_ids"}
_COUNT_PARAMETERS = ("input_ids", "padding_idx", _CACHE_LENGTH)
_BIAS_PARAMETERS = ("query_length", "key_length", "device", "past_seen_tokens")


class DecoderPatches(SlotPatches):
    """Patches the modules of one decoder that derive positions from slots.

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
        """Ends of position tables that cannot grow; relative biases have none."""
        lengths = {table.num_embeddings - getattr(table, "offset", 0) for table in self._tables}
        return Positions(tuple(sorted(lengths)))

    @contextmanager
    def patched_for(self, inputs: Inputs) -> Iterator[None]:
        """Make these modules use the positions in `inputs` for calls from this thread, while the context lasts.

        Raises:
            UnsupportedModelError: a module was not called, or not from this thread.
        """
        with ExitStack() as stack:
            patches = [_read_by_position(table, inputs.positions) for table in self._tables]
            patches += [_counted_by_position(table, inputs.positions) for table in self._counting]
            patches += [_biased_by_position(layer, inputs) for layer in self._biased]
            overrides = [stack.enter_context(patch) for patch in patches]
            yield
            if not all(override.used for override in overrides):
                raise UnsupportedModelError(
                    "its layers were not called from the decoding thread, so they did not see a tree's positions",
                    "call the model directly, or use plain model.generate",
                )


def _is_table(module: Any) -> bool:
    return (
        isinstance(module, nn.Embedding) and set(inspect.signature(type(module).forward).parameters) > _TABLE_PARAMETERS
    )


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
