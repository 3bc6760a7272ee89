"""The CPU backend's public object: packed layers, and models whose rows round alike in every pass."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from lade.backends.cpu.invariant_marker import why_tried_in_vain
from lade.backends.cpu.packing.weight import PackedWeight
from lade.model.backend import Backend
from lade.model.facts import ModelFacts
from lade.model.masks import INVARIANT_ATTENTION


class CpuBackend(Backend):
    """Packed and batch-invariant layers; see `lade.model.joint`. Compilers are imported with the layers that need one.

    Attributes:
        packed_weight: class of the weights of packed layers.
    """

    packed_weight = PackedWeight

    @cached_property
    def packed_layer(self) -> type[nn.Module]:
        """Class of packed layers that give the bits of the layers they replace."""
        from lade.backends.cpu.packing.linear import PackedLinear

        return PackedLinear

    @cached_property
    def int8_layer(self) -> type[nn.Module]:
        """Class of packed layers that round what they are fed to int8."""
        from lade.backends.cpu.packing.int8 import Int8Linear

        return Int8Linear

    def refusal(self, facts: ModelFacts, config: PretrainedConfig) -> str:
        """Return what has changed since a model was made invariant, so that its rows may not round alike any more."""
        return why_tried_in_vain(facts, config._attn_implementation == INVARIANT_ATTENTION)

    def refuse_autocast(self, model: Any) -> None:
        """Raise `UnsupportedModelError` where autocast asks for another dtype than layers are packed in."""
        from lade.backends.cpu.packing.linear import refuse_autocast

        refuse_autocast(model)

    def can_be_invariant(self, model: nn.Module) -> bool:
        """Whether `lade.invariant` has a chance with this model on this machine."""
        from lade.backends.cpu.invariant.make_invariant import can_be_tried

        return can_be_tried(model)

    def placed_mask(self, allowed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the mask that `lade_invariant` takes.

        Args:
            allowed: `[B, 1, S, K]` bool, true where a query may see a key.
            positions: `[B, K]` int64, of the keys.
        """
        from lade.backends.cpu.invariant.attention import PlacedMask

        return PlacedMask.of(allowed, positions)


BACKEND = CpuBackend()
