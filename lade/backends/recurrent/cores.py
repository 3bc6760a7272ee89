"""Recurrent cores over a tree: gated delta rule, Mamba 1, Mamba 2, and the patches that install them.

Mixers call them by the names that their module knows them by, so what those names mean is changed for the thread that
runs the pass, and for its length: prefill, plain decoding and other threads call the original functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from lade.backends.recurrent.layer import layers_for
from lade.backends.recurrent.tree_pass import (
    LinearFolding,
    TreePass,
    convolution,
    decayed_products,
    path_sums,
)
from lade.decoding.tree import TokenTree
from lade.errors import UnsupportedModelError
from lade.model.cache_layers import Ancestry
from lade.model.facts import ModelFacts
from lade.model.inputs import upload
from lade.model.thread_patches import Override, overridden


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


CORES: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2,
    "mamba_selective_scan": selective_scan,
}
"""By the name of the function for several tokens (`facts.RECURRENT_FUNCTIONS`); called with the pass, that function,
and its arguments."""


class CorePatches:
    """Replaces the functions that the recurrent layers of one model call; see `joint.Recurrence`.

    Args:
        facts: of a model with such layers.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self._found, self._config = facts.recurrent_functions, facts.model.config

    def layers(self) -> list[Any]:
        """Return the empty layers of a `TreeCache` for the model."""
        return layers_for(self._config)

    def ancestry(self, trees: Sequence[TokenTree]) -> TreePass:
        """Return who descends from whom in one pass over trees, one a row."""
        return TreePass(trees)

    @property
    def forgets(self) -> bool:
        """Whether what feeds several tokens begins with an empty state, and does not say so."""
        return any(name == "mamba_selective_scan" for _, name in self._found)

    @contextmanager
    def patched_for(self, tree_pass: Ancestry) -> Iterator[None]:
        """While the context lasts, the cores compute what this thread feeds to recurrent layers.

        Raises:
            UnsupportedModelError: one of the functions was not called, or not by this thread.
        """
        with ExitStack() as stack:
            overrides = [
                (name, stack.enter_context(_replaced(module, name, tree_pass))) for module, name in self._found
            ]
            yield
            called = {name for name, override in overrides if override.used}
            if any(name not in called for name, _ in overrides):  # a part may come from the module of another family
                raise UnsupportedModelError(
                    "its recurrent layers do not call the functions that know of a tree",
                    "load the model without kernels from elsewhere, or use plain model.generate",
                )


def _replaced(module: ModuleType, name: str, tree_pass: Ancestry) -> AbstractContextManager[Override]:
    return overridden(module, name, lambda original: partial(CORES[name], tree_pass, original))
