"""The tree attention backend; importing it registers `lade_tree` with transformers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lade.backends.tree_attention import attention  # noqa: F401 - registers the implementation
from lade.backends.tree_attention.tree_mask import TreeInputs
from lade.decoding.tree import TokenTree
from lade.model.backend import Backend
from lade.model.masks import Inputs


class TreeAttentionBackend(Backend):
    """Compact masks for attention over token trees, see `lade.model.joint`."""

    def inputs(self, trees: Sequence[TokenTree], lengths: Sequence[int], device: torch.device, held: int) -> Inputs:
        """Return the inputs of a step over one tree per row, whose mask is a `TreeMask`; see `StepInputs.of`.

        Args:
            trees: one tree per row.
            lengths: `[B]`, cached tokens of each row.
            device: device of the tensors.
            held: number of cached tokens of a single row that are the first nodes of its tree.
        """
        return TreeInputs.of(trees, lengths, device, held)


BACKEND = TreeAttentionBackend()
