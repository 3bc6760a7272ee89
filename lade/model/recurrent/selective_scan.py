"""The selective scan of Mamba 1 over a tree, depth by depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from lade.model.host_to_device import upload
from lade.model.recurrent.tree_pass import TreePass


@dataclass(frozen=True)
class NodeStates:
    """Folds a path by choosing the state of its last node.

    Attributes:
        states: `[B, S, ...]`, of all nodes.
    """

    states: torch.Tensor

    def fold(self, state: torch.Tensor, last: torch.Tensor) -> None:
        """See `Folding.fold`."""
        state.copy_(self.states[torch.arange(len(last), device=last.device), last])


def selective_scan(
    tree_pass: TreePass,
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, NodeStates]:
    """What Mamba 1 gives at each node of a tree, as if its path were fed token by token.

    Each channel and state decays by itself, so there is no attention form that would be cheaper than the states.

    Args:
        tree_pass: the trees; its `state` is that of the text, which mixers do not pass.
        original: the function of transformers, which is not called.
        hidden_states: `[B, C, S]`.
        dt: `[B, C, S]`.
        A: `[C, N]`, negative.
        B: `[B, N, S]`.
        C: `[B, N, S]`.
        D: `[C]`, weights of the inputs themselves in the outputs.
        z: `[B, C, S]`, gates of the outputs.
        delta_bias: `[C]`, added to `dt`.
        delta_softplus: whether dt goes through a softplus.
        kwargs: of the original, without a meaning here.

    Returns:
        Outputs `[B, C, S]` in the dtype of `hidden_states`, and what gives the state after a path.
    """
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = functional.softplus(dt)
    steps, inputs = dt.float().mT[..., None], hidden_states.float().mT[..., None]  # [B, S, C, 1]
    added = steps * B.float().mT[:, :, None] * inputs  # [B, S, C, N]
    assert tree_pass.state is not None, "a tree is fed after a prompt"
    states = _along_paths(tree_pass, tree_pass.state.float(), torch.exp(steps * A.float()), added)
    outputs = (states.to(C.dtype) @ C.mT[..., None])[..., 0].mT
    if D is not None:
        outputs = outputs + hidden_states * D[:, None]
    if z is not None:
        outputs = outputs * functional.silu(z)
    return outputs.to(hidden_states.dtype), NodeStates(states)


def _along_paths(tree_pass: TreePass, state: torch.Tensor, decay: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """The states of all nodes, `[B, S, C, N]`: what their parent's has decayed to, and what they add.

    Args:
        tree_pass: the trees.
        state: `[B, C, N]`, of the text.
        decay: `[B, S, C, N]`.
        added: `[B, S, C, N]`.
    """
    states = torch.empty_like(added)
    for depth in range(int(tree_pass.depths.max()) + 1):
        at = np.nonzero(tree_pass.depths == depth)
        rows, nodes, parents = upload([*at, tree_pass.parents[at]], added.device)
        before = states[rows, parents] if depth else state[rows]
        states[rows, nodes] = decay[rows, nodes] * before + added[rows, nodes]
    return states
