"""The state space model of Mamba 2 over a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from lade.model.recurrent.folding import LinearFolding
from lade.model.recurrent.paths import decayed_products, path_sums
from lade.model.recurrent.tree_pass import Ancestry


def mamba2(
    tree_pass: Ancestry,
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    initial_states: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, LinearFolding]:
    """What Mamba 2 gives at each node of a tree, as if its path were fed token by token.

    Decoding does not clamp dt, while prefill does (`dt_limit`); a tree is decoding.

    Args:
        tree_pass: the trees.
        original: the function of transformers, which is not called.
        hidden_states: `[B, S, H, P]`.
        dt: `[B, S, H]`.
        A: `[H]`, negative.
        B: `[B, S, G, N]`, the keys; H is a multiple of G.
        C: `[B, S, G, N]`, the queries.
        initial_states: `[B, H, P, N]`.
        D: `[H]`, weights of the inputs themselves in the outputs.
        dt_bias: `[H]`.
        dt_softplus: whether dt goes through a softplus.
        kwargs: of the original, without a meaning here.

    Returns:
        Outputs `[B, S, H, P]` float32, and what folds a path into the state.
    """
    group = hidden_states.shape[2] // B.shape[2]
    steps = _steps(dt, dt_bias, softplus=dt_softplus).transpose(1, 2)[..., None].float()  # [B, H, S, 1]
    keys, queries = (states.repeat_interleave(group, dim=2).transpose(1, 2).float() for states in (B, C))
    inputs, closure = hidden_states.transpose(1, 2).float(), tree_pass.closure(dt.device)
    decay = path_sums(A.float()[:, None, None] * steps, closure)
    written = steps * inputs  # [B, H, S, P]
    outputs = decayed_products(queries, keys, decay, closure) @ written
    outputs += decay.exp() * (queries @ initial_states.float().mT)
    if D is not None:
        outputs += D[:, None, None] * inputs
    folding = LinearFolding(keys, written, decay, closure, value_first=True)
    return outputs.transpose(1, 2).contiguous(), folding  # some mixers take a view of it


def _steps(dt: torch.Tensor, bias: torch.Tensor | None, *, softplus: bool) -> torch.Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return functional.softplus(dt) if softplus else dt
