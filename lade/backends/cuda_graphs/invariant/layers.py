"""Invariant layers in place of a model's own: products of 64 rows, and attention in tiles at fixed positions.

A matrix product over another number of rows may be another kernel, which adds up in another order. Over 64 rows, a row
gets the same bits wherever it lies and whatever lies beside it. So every product is made of pieces of 64 rows, the last
one filled up with anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, pad

from lade.backends.cuda_graphs.buffers import StepShape
from lade.backends.cuda_graphs.fused import LayerWeights
from lade.backends.cuda_graphs.fused_kernels import ROWS, Norm, norm, rotate_and_store
from lade.backends.cuda_graphs.invariant.attention import Places, attend
from lade.backends.cuda_graphs.pass_inputs import StaticInputs
from lade.model.facts import CACHE_NAMES
from lade.model.inputs import FULL
from lade.model.module_changes import Changed, change

_ALIGNMENT = 256
"""Bytes. Libraries choose their kernels by the alignment of addresses too, up to this."""


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return a linear layer's outputs `[..., M]` for inputs `[..., N]`, in pieces of 64 rows."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    count, columns = rows.shape
    whole = -(-count // ROWS) * ROWS
    room = rows.untyped_storage().nbytes() // rows.itemsize - rows.storage_offset()
    if room < whole * columns or rows.data_ptr() % _ALIGNMENT:
        rows = pad(rows, (0, 0, 0, whole - count)) if whole > count else rows.clone()
    pieces = [linear(piece, weight, bias) for piece in rows.as_strided((whole, columns), (columns, 1)).split(ROWS)]
    found = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return found[:count].view(*x.shape[:-1], -1)


class InvariantLayer(Changed):
    """Mixin for the class of a decoder layer."""

    self_attn: Any

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, S, H]
        attention_mask: torch.Tensor | None = None,  # [B, 1, S, K] bool; None if the queries are the last of the keys
        position_ids: torch.Tensor | None = None,  # [B, S], or [1, S] for all rows
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,  # [B, S, D] or [1, S, D] each
        **kwargs: Any,  # the cache, and what other kinds of attention read
    ) -> torch.Tensor:
        """Compute the layer as transformers asks for it, for inference.

        What a query sees has consecutive positions, and ends at its own.

        Raises:
            ValueError: a gradient is asked for, or the mask is not a boolean one.
        """
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise ValueError("an invariant model has no gradients: call it under torch.no_grad()")
        assert position_ids is not None and position_embeddings is not None
        layer, attention = LayerWeights.of(self, FULL), self.self_attn
        rows, step = hidden_states.shape[:2]
        cos, sin = (each.expand(rows, -1, -1).contiguous() for each in position_embeddings)
        cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)

        def attended(qkv: torch.Tensor) -> torch.Tensor:
            kv_heads = attention.k_proj.out_features // attention.head_dim
            keys, values = qkv.new_empty(2, rows, kv_heads, step, attention.head_dim)
            slots = torch.arange(step, device=qkv.device).expand(rows, -1).contiguous()
            query = rotate_and_store(qkv, (cos, sin), layer.head_norms, keys, values, slots)
            if cache is not None:
                keys, values = cache.update(keys, values, attention.layer_idx)
            places = _places(position_embeddings[0], attention_mask, position_ids.expand(rows, -1), keys.shape[2])
            return attend(query, keys, values, places, scale=layer.scaling)

        x, (added, added_norm) = layer.run(hidden_states.contiguous(), None, attended, product)
        return x + added if added_norm is None else norm(x, layer.norms[0], added, added_norm)[0]

    @staticmethod
    def parts_of_tree_pass(inputs: StaticInputs, shape: StepShape) -> tuple[Any, Callable[..., torch.Tensor]]:
        """Return what a fused pass over trees computes with, so that it has the bits of this layer's own passes.

        Returns:
            The function of a linear layer, and that of a layer's attention over queries, keys and values.
        """
        shifts = torch.zeros_like(inputs.lengths) if inputs.offsets is None else -inputs.offsets[0, :, 0]
        places = Places.of_trees(inputs.closure, inputs.positions, inputs.lengths, shifts, shape.keys)

        def attended(layer: LayerWeights, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return attend(query, key, value, places.within(layer.span.window), scale=layer.scaling)

        return product, attended


class LastNorm(Changed):
    """Mixin for the class of the last norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of `[..., H]`."""
        return norm(x.contiguous(), Norm.of(self))[1]


class InvariantHead(Changed):
    """Mixin for the class of the language model head."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits `[..., V]` of states `[..., H]`."""
        return product(x, self.weight, self.bias)


def _places(holder: Any, mask: torch.Tensor | None, positions: torch.Tensor, keys: int) -> Places:
    """Return the places of the keys, computed once for the layers of a pass, which share `holder`."""
    kept: dict[Any, Places] = vars(holder).setdefault("_places_of_keys", {})
    key = id(mask), keys
    if key not in kept:
        if mask is None:
            kept[key] = Places.of_text(positions, keys)
        elif mask.dtype == torch.bool:
            kept[key] = Places.of_mask(positions, mask[:, 0].expand(len(positions), -1, -1))
        else:
            raise ValueError(f"an invariant model takes boolean masks: this one is {mask.dtype}")
    return kept[key]


def replace_layers(model: Any) -> None:
    """Replace the layers of a model of a fused family by invariant ones, in place; `restore` undoes it."""
    for layer in model.model.layers:
        LayerWeights.of(layer, FULL)
        change(layer, InvariantLayer)
    change(model.model.norm, LastNorm)
    change(model.lm_head, InvariantHead)
