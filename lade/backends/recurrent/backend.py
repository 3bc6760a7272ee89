"""The recurrent backend: cores over a tree, the patches that install them, and trees kept over several passes.

Mixers look up the functions of their core in their module, so the names there are patched for the thread that runs the
pass, while it runs. Prefill, plain decoding and other threads call the original functions.

A core is called with the ancestry of the trees, the function that it replaces, and that function's arguments, of which
it ignores those that make no difference to a tree.

States can only move forward through text. So between two passes over a tree that is kept, the cache holds the text
before its root, and a pass feeds the whole tree, including nodes that earlier passes have fed:

    text, in the states           tree, fed by each pass until it is accepted or rejected
    Once upon a time there ────── was ── a ── little ─┬─ girl
                                                      └─ boy
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

from lade.backends.recurrent.layer import LinearFolding, TreePass, convolution, decayed_products, layers_for, path_sums
from lade.clock import Duration
from lade.decoding.tree import TokenTree
from lade.errors import UnsupportedModelError
from lade.model.cache_layers import Ancestry
from lade.model.facts import RECURRENT_LAYERS, ModelFacts
from lade.model.inputs import upload
from lade.model.kv_cache import TreeCache
from lade.model.module_changes import Override, overridden
from lade.model.runner import EagerRunner


def delta_rule(
    tree_pass: Ancestry,
    original: Callable[..., Any],
    query: torch.Tensor,  # [B, S, Hk, K]
    key: torch.Tensor,  # [B, S, Hk, K]
    value: torch.Tensor,  # [B, S, H, V]; H is a multiple of Hk
    g: torch.Tensor,  # [B, S, H], or [B, S, H, K] with one per channel: log decays, at most 0
    beta: torch.Tensor,  # [B, S, H], how much of the state a node overwrites
    *,
    initial_state: torch.Tensor,  # [B, H, K, V], of the text
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, LinearFolding]:
    """Compute a gated delta rule at each node of a tree, as if its path were fed token by token.

    With G the sum of log decays down to a node and S the state of the text, each node writes `u = beta (v - e^G k S -
    sum over its ancestors of e^(G - G') (k k') u')`. Nodes come after their ancestors, so this is a triangular system.
    Everything is float32, as in transformers' functions.

    Returns:
        Outputs `[B, S, H, V]` in the dtype of `query`, and the folding of a path into the state.
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
    system = beta * decayed_products(key, key, decay, closure)  # the solver assumes a unit diagonal
    recalled, read = (torch.cat([left * key, left * query], dim=2) @ state).chunk(2, dim=2)  # [B, H, S, V]
    wanted = beta * (value - recalled)
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)  # [B, H, S, V]
    outputs = read + decayed_products(query, key, decay, closure) @ written
    return outputs.transpose(1, 2).to(dtype), LinearFolding(key, written, decay, closure)


@dataclass(frozen=True)
class NodeStates:
    """Folds a path by selecting the state of its last node."""

    states: torch.Tensor  # [B, S, ...], of all nodes

    def fold(self, state: torch.Tensor, last: torch.Tensor) -> None:
        """See `Folding.fold`."""
        state.copy_(self.states[torch.arange(len(last), device=last.device), last])


def selective_scan(
    tree_pass: TreePass,
    original: Callable[..., Any],
    hidden_states: torch.Tensor,  # [B, C, S]
    dt: torch.Tensor,  # [B, C, S] step sizes
    A: torch.Tensor,  # [C, N] decay rates, negative
    B: torch.Tensor,  # [B, N, S] input projections
    C: torch.Tensor,  # [B, N, S] output projections
    D: torch.Tensor | None = None,  # [C] skip weights of the inputs
    z: torch.Tensor | None = None,  # [B, C, S] output gates
    delta_bias: torch.Tensor | None = None,  # [C], added to `dt`
    delta_softplus: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, NodeStates]:
    """Compute Mamba 1 at each node of a tree, as if its path were fed token by token.

    Each channel and state decays separately, so no attention form would be cheaper than the states themselves. Mixers
    do not pass the state of the text, which `tree_pass` has.

    Returns:
        Outputs `[B, C, S]` in the dtype of `hidden_states`, and the folding of a path into the state.
    """
    dt = _steps(dt.mT, delta_bias, softplus=delta_softplus)  # [B, S, C]
    steps, inputs = dt.float()[..., None], hidden_states.float().mT[..., None]  # [B, S, C, 1]
    added = steps * B.float().mT[:, :, None] * inputs  # [B, S, C, N]
    assert tree_pass.state is not None, "trees are fed after a prompt"
    states = _path_states(tree_pass, tree_pass.state.float(), torch.exp(steps * A.float()), added)
    outputs = (states.to(C.dtype) @ C.mT[..., None])[..., 0].mT
    if D is not None:
        outputs = outputs + hidden_states * D[:, None]
    if z is not None:
        outputs = outputs * functional.silu(z)
    return outputs.to(hidden_states.dtype), NodeStates(states)


def _path_states(tree_pass: TreePass, state: torch.Tensor, decay: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Return the states of all nodes: the decayed state of their parent, plus their own addition, `[B, S, C, N]` each.

    The roots' parent is the text, whose state is `[B, C, N]`.
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
    hidden_states: torch.Tensor,  # [B, S, H, P]
    dt: torch.Tensor,  # [B, S, H] step sizes
    A: torch.Tensor,  # [H] decay rates, negative
    B: torch.Tensor,  # [B, S, G, N] keys; H is a multiple of G
    C: torch.Tensor,  # [B, S, G, N] queries
    *,
    initial_states: torch.Tensor,  # [B, H, P, N], of the text
    D: torch.Tensor | None = None,  # [H] skip weights of the inputs
    dt_bias: torch.Tensor | None = None,  # [H], added to `dt`
    dt_softplus: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, LinearFolding]:
    """Compute Mamba 2 at each node of a tree, as if its path were fed token by token.

    Like decoding, and unlike prefill, this does not clamp `dt` (`dt_limit`).

    Returns:
        Outputs `[B, S, H, P]` float32, and the folding of a path into the state.
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
    return outputs.transpose(1, 2).contiguous(), folding  # some mixers view it


def _steps(dt: torch.Tensor, bias: torch.Tensor | None, *, softplus: bool) -> torch.Tensor:
    """Return step sizes, whose last dimension is that of the bias."""
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
"""Core by the name of transformers' function for several tokens (`facts.RECURRENT_FUNCTIONS`)."""


class CorePatches:
    """Replaces the functions that the recurrent layers of one model call; see `lade.model.cache_layers.Recurrence`."""

    def __init__(self, facts: ModelFacts) -> None:
        self._found, self._config = facts.recurrent_functions, facts.model.config

    def layers(self) -> list[Any]:
        """Return the empty layers of a `TreeCache` for the model."""
        return layers_for(self._config)

    def ancestry(self, trees: Sequence[TokenTree]) -> TreePass:
        """Return the ancestry of one pass over trees, one per row."""
        return TreePass(trees)

    @property
    def forgets(self) -> bool:
        """True if the function for several tokens starts from an empty state, ignoring the cached one."""
        return any(name == "mamba_selective_scan" for _, name in self._found)

    @contextmanager
    def patched_for(self, tree_pass: Ancestry) -> Iterator[None]:
        """Install the cores for calls from this thread, while the context lasts.

        Raises:
            UnsupportedModelError: a function was not called, or not from this thread.
        """
        with ExitStack() as stack:
            overrides = [
                (name, stack.enter_context(_replaced(module, name, tree_pass))) for module, name in self._found
            ]
            yield
            called = {name for name, override in overrides if override.used}
            if any(name not in called for name, _ in overrides):  # layers may come from the module of another family
                raise UnsupportedModelError(
                    "its recurrent layers do not call the functions that are patched for trees",
                    "load the model without external kernels, or use plain model.generate",
                )


def _replaced(module: ModuleType, name: str, tree_pass: Ancestry) -> AbstractContextManager[Override]:
    return overridden(module, name, lambda original: partial(CORES[name], tree_pass, original))


class RefedCache(TreeCache):
    """Holds the text of rows up to the roots of their trees; roots are text as well, and advance with every pass."""

    def __init__(self) -> None:
        super().__init__()
        self._paths: Sequence[Sequence[int]] = ()
        self._slots: int | None = None  # slots of the last pass; None before the first one

    def keep(self, paths: Sequence[Sequence[int]], fed: int, held: Sequence[int] | None = None) -> None:
        """Record the paths to keep; `commit` learns how many of their nodes have become text."""
        self._paths = paths

    def commit(self, held: Sequence[int]) -> None:
        """Fold the text before the new roots into the states; of the kept nodes `held`, `[B]`, are in the new trees."""
        texts = [path[: len(path) - own] for path, own in zip(self._paths, held, strict=True)]
        if self._slots is None:  # the roots are the last tokens of the prompts
            super().keep(texts, 0, [1] * len(texts))
        else:
            super().keep(texts, self._slots)

    def fed(self, slots: int) -> None:
        """Record a pass over trees of at most `slots` nodes."""
        self._slots = slots


class RefeedingRunner:
    """Feeds whole trees, where `EagerRunner.extend` feeds only nodes that are not cached."""

    refeeds = True

    def __init__(self, runner: EagerRunner) -> None:
        self._runner, self.clock = runner, runner.clock
        self.prefill, self.room = runner.prefill, runner.room

    @property
    def pass_time(self) -> Duration:
        """See `EagerRunner.pass_time`."""
        return self._runner.pass_time

    @property
    def prepared(self) -> bool:
        """See `EagerRunner.prepared`."""
        return self._runner.prepared

    def extend(self, trees: Sequence[TokenTree], held: Sequence[int], cache: RefedCache) -> torch.Tensor:
        """Feed one tree per row, whose root is text, and return the logits of nodes that are new, `[B, S, V]`.

        Of each tree the first nodes, `held`, were fed by an earlier pass, and given to the cache's `keep`.
        """
        cache.commit(held)
        logits = self._runner.forward(trees, [()] * len(trees), cache)
        cache.fed(logits.shape[1])
        new = max(len(tree) - own for tree, own in zip(trees, held, strict=True))
        rows = [row[own : own + new] for row, own in zip(logits, held, strict=True)]  # [S or fewer, V]
        return torch.stack([functional.pad(row, (0, 0, 0, new - len(row))) for row in rows])


class RecurrentBackend:
    """Token trees through recurrent layers, see `lade.model.registry`."""

    of = CorePatches


BACKEND = RecurrentBackend()
RECURRENT_LAYERS.fill(BACKEND)
