"""The CPU backend: packed linear layers and batch-invariant models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from lade.backends.cpu.invariant_marker import stale_reason
from lade.backends.cpu.packing.integers import Int8Linear
from lade.backends.cpu.packing.linear import PackedLinear, refuse_autocast
from lade.backends.cpu.packing.weight import PackedWeight
from lade.model.facts import PACKED, ModelFacts
from lade.model.inputs import PLACED_MASKS
from lade.model.supports import INVARIANT_MODELS


class CpuBackend:
    """Packed and batch-invariant layers; what makes a model either is imported when it is first asked for."""

    packed_weight: type[nn.Parameter] = PackedWeight
    packed_layer: type[nn.Module] = PackedLinear  # in the model's dtype, as linear as the original ones
    int8_layer: type[nn.Module] = Int8Linear  # quantises its inputs to int8
    refuse_autocast = staticmethod(refuse_autocast)

    def refusal(self, facts: ModelFacts, config: PretrainedConfig) -> str:
        """Return why an invariant model may no longer be invariant; an empty string otherwise."""
        return stale_reason(facts, config._attn_implementation)

    def pack_like(self, module: nn.Module, layer: Any) -> None:
        """Pack a module in the format and with the products of a packed layer, in place; nothing is measured."""
        from lade.backends.cpu.packing import pack

        kinds = pack.packable(module, weights=getattr(layer, "WEIGHTS", None))
        pack.pack_layers(module, kinds, panel=layer.panel)

    def can_be_invariant(self, model: nn.Module) -> bool:
        """Return True if `lade.invariant` would try this model on this machine."""
        from lade.backends.cpu.invariant.make_invariant import refusal

        return not refusal(model)

    def placed_mask(self, allowed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the mask that `lade_invariant` takes: `[B, 1, S, K]` bool, and positions of the keys, `[B, K]`."""
        from lade.backends.cpu.invariant.attention import PlacedMask

        return PlacedMask.of(allowed, positions)


BACKEND = CpuBackend()
PACKED.fill(BACKEND)
PLACED_MASKS.fill(BACKEND)
INVARIANT_MODELS.fill(BACKEND)
