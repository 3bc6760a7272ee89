"""Mixtures of experts whose rows are padded: how many tokens meet in an expert differs from pass to pass.

An implementation `lade_invariant` of transformers' interface for experts. Each expert computes all tokens that chose
it, as transformers' own loop does; a token's results are added up in the order of the experts' numbers, which does not
depend on the other tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from lade.model.invariant.padded_rows import call_padded, padding_of

NAME = "lade_invariant"


def invariant_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts' part of a layer.

    Args:
        self: the layer's experts, as transformers' decorator marks them.
        hidden_states: `[T, hidden]`.
        top_k_index: `[T, k]` int64, the experts of each token.
        top_k_weights: `[T, k]`, their weights.

    Returns:
        `[T, hidden]`.
    """
    padding = padding_of(self)
    found = torch.zeros_like(hidden_states)
    for number in top_k_index.unique().tolist():
        tokens, places = torch.where(top_k_index == number)
        inner = expert_product(self, "gate_up_proj" if self.has_gate else "up_proj", number)
        outer = expert_product(self, "down_proj", number)
        states = call_padded(partial(_one_expert, self, inner, outer), hidden_states[tokens], padding)
        if getattr(self, "has_post_expert_norm", False):
            states = self.post_expert_norm(states)
        found.index_add_(0, tokens, (states * top_k_weights[tokens, places, None]).to(found.dtype))
    return found


def _one_expert(experts: Any, inner: Any, outer: Any, rows: torch.Tensor) -> torch.Tensor:
    states = inner(rows)
    found: torch.Tensor = outer(experts._apply_gate(states) if experts.has_gate else experts.act_fn(states))
    return found


def has_own_gate(experts: Any) -> bool:
    """Whether experts have activations of their own, and not just those of their activation module."""
    return type(experts)._apply_gate is not _default_apply_gate


def expert_product(experts: Any, name: str, number: int) -> Any:
    """The linear map of one expert: `[rows, in]` to `[rows, out]`."""
    weight = getattr(experts, name)[number]
    bias = getattr(experts, f"{name}_bias")[number] if experts.has_bias else None
    if experts.is_transposed:
        return partial(_transposed, weight=weight, bias=bias)
    return partial(linear, weight=weight, bias=bias)


def _transposed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(x, weight.t(), bias)


ALL_EXPERTS_FUNCTIONS.register(NAME, invariant_experts)
