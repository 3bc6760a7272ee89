"""The public object of `lade_tree`; importing it makes the name known to transformers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lade.backends.tree_attention import attention  # noqa: F401 - registers the implementation
from lade.backends.tree_attention.tree_mask import TreeInputs
from lade.decoding.tree import TokenTree
from lade.model.backend import Backend
from lade.model.masks import Inputs


class TreeAttentionBackend(Backend):
    """Compact masks for attention that knows token trees; see `lade.model.joint`."""

    def inputs(self, trees: Sequence[TokenTree], lengths: Sequence[int], device: torch.device, held: int) -> Inputs:
        """Return the tensors of a step over one tree a row, whose mask is a `TreeMask`; see `StepInputs.of`.

        Args:
            trees: one for each row.
            lengths: `[B]`, cached tokens of each row.
            device: where the tensors go.
            held: how many of a lone row's cached tokens are the first nodes of its tree.
        """
        return TreeInputs.of(trees, lengths, device, held)


BACKEND = TreeAttentionBackend()
