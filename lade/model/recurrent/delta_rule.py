"""The gated delta rule over a tree: all nodes at once, by one triangular solve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lade.model.recurrent.folding import LinearFolding
from lade.model.recurrent.paths import decayed_products, path_sums
from lade.model.recurrent.tree_pass import Ancestry


def delta_rule(
    tree_pass: Ancestry,
    original: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, LinearFolding]:
    """What a gated delta rule gives at each node of a tree, as if its path were fed token by token.

    With G the sum of the decays down to a node and S the state of the text, each node writes
    `u = beta (v - e^G k S - sum over its ancestors of e^(G - G') (k k') u')`. Nodes come after their ancestors, so this
    is a triangular system. All is float32, as in transformers' functions.

    Args:
        tree_pass: the trees.
        original: the function of transformers, which is not called.
        query: `[B, S, Hk, K]`.
        key: `[B, S, Hk, K]`.
        value: `[B, S, H, V]`; H is a multiple of Hk.
        g: `[B, S, H]`, or `[B, S, H, K]` with one for each channel: logarithms of the decays, at most 0.
        beta: `[B, S, H]`, how much of the state a node overwrites.
        initial_state: `[B, H, K, V]`.
        use_qk_l2norm_in_kernel: whether queries and keys are normalised.
        kwargs: of the original, without a meaning here.

    Returns:
        Outputs `[B, S, H, V]` in the dtype of `query`, and what folds a path into the state.
    """
    dtype, group = query.dtype, value.shape[2] // key.shape[2]
    query, key = (states.repeat_interleave(group, dim=2) for states in (query, key))
    query, key, value, g, beta = (states.transpose(1, 2).float() for states in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (states * torch.rsqrt((states * states).sum(-1, keepdim=True) + 1e-6) for states in (query, key))
    query, beta = query / query.shape[-1] ** 0.5, beta[..., None]  # beta: [B, H, S, 1]
    state, closure = initial_state.float(), tree_pass.closure(query.device)
    decay = path_sums(g if g.ndim == 4 else g[..., None], closure)  # [B, H, S, 1 or K]
    left = decay.exp()
    system = beta * decayed_products(key, key, decay, closure)  # its diagonal is taken for ones
    recalled, read = (torch.cat([left * key, left * query], dim=2) @ state).chunk(2, dim=2)  # [B, H, S, V]
    wanted = beta * (value - recalled)
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)  # [B, H, S, V]
    outputs = read + decayed_products(query, key, decay, closure) @ written
    return outputs.transpose(1, 2).to(dtype), LinearFolding(key, written, decay, closure)
