"""Invariant layers in place of those of a model on a GPU, and the trials of it; see `lade.invariant`.

A matrix product over another number of rows may be another kernel, which adds up in another order. Over 64 rows, a row
gets the same bits wherever it lies and whatever lies beside it. So every product is made of pieces of 64 rows, the last
one filled up with anything; attention goes in tiles at fixed positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, pad

from lade.backends.cpu.invariant.trials import ModelTrial, distinct_layers
from lade.backends.cpu.invariant_marker import Invariance, changed_modules, set_invariance
from lade.backends.cuda_graphs.buffers import StepShape
from lade.backends.cuda_graphs.fused import LayerWeights, fusion_refusal
from lade.backends.cuda_graphs.fused_kernels import ROWS, Norm, norm, rotate_and_store
from lade.backends.cuda_graphs.invariant.attention import Places, attend
from lade.backends.cuda_graphs.pass_inputs import StaticInputs
from lade.backends.cuda_graphs.pool import BufferPool
from lade.backends.cuda_graphs.runner import GraphRunner
from lade.backends.trials.backend import LONGEST_PROBE_TOKENS
from lade.decoding.tree import TokenTree
from lade.model.config import window_lengths
from lade.model.facts import CACHE_NAMES, ModelFacts
from lade.model.inputs import FULL
from lade.model.masks import MaskPlan
from lade.model.module_changes import Changed, change, restore
from lade.model.runner import EagerRunner
from lade.model.supports import supports

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
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute the layer as transformers asks for it, for inference.

        Args:
            hidden_states: `[B, S, H]`.
            attention_mask: `[B, 1, S, K]` bool; None if the queries are the last of the keys. What a query sees has
                consecutive positions, and ends at its own.
            position_ids: `[B, S]`, or `[1, S]` for all rows.
            position_embeddings: cosines and sines of the positions, `[B, S, D]` or `[1, S, D]` each.
            kwargs: the cache, and what other kinds of attention read.

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


TEXTS = (5, 61, 125, 250)
"""Lengths of the texts of the trial; trees behind all but the first cross the border of a tile, two that of a span."""
PAST = 3
"""Tokens by which one more text exceeds each sliding window."""
TREES = (1, 14, 64)
"""Nodes of the trees that are also fed by captured passes."""


def refusal(model: Any) -> str:
    """Return why a model is not even tried; an empty string otherwise."""
    support = supports(model)
    if support.plan is None:
        return support.reason
    if model.config._attn_implementation != "sdpa":
        return f"its attention is {model.config._attn_implementation}: load it with attn_implementation='sdpa'"
    return fusion_refusal(ModelFacts.of(model), support.plan)


def make_invariant(model: Any, pool: BufferPool) -> str:
    """Make a model that is not refused invariant, in place; return why that failed, with the model unchanged."""
    if pool.in_use:
        return "a generation or an engine uses it"
    try:
        change_layers(model)
        problem = _first_difference(model, supports(model).require(), pool)
    except BaseException:
        _undo(model)
        raise
    if problem:
        _undo(model)
    return problem


def change_layers(model: Any) -> None:
    """Replace the layers of a model, in place, and mark it; nothing is tried."""
    from lade.backends.cuda_graphs.invariant.make_invariant import replace_layers

    with torch.inference_mode(False), torch.no_grad():
        replace_layers(model)
    facts = ModelFacts.of(model)
    attention, changed = model.config._attn_implementation, changed_modules(facts)
    set_invariance(model, Invariance(None, model.dtype, len(facts.modules), attention, None, changed))


def _undo(model: Any) -> None:
    restore(model)
    set_invariance(model, None)


def _first_difference(model: Any, plan: MaskPlan, pool: BufferPool) -> str:
    """Return what rounds a token differently in two passes; an empty string if nothing does."""
    with distinct_layers(model):
        for tokens in _texts(model.config):
            trial = ModelTrial(model, plan, tokens)
            differing = trial.first_mismatch() or (trial.first_batch_mismatch() if tokens == TEXTS[0] else None)
            if differing is not None:
                return f"{differing!r} is the first part that rounds a token differently beside other tokens"
        for nodes in TREES:
            if not _captured_equals_eager(model, plan, pool, nodes):
                return f"a captured pass of {nodes} tokens rounds differently from one that is not captured"
    return ""


def _texts(config: Any) -> list[int]:
    windows = [window for window in window_lengths(config) if window <= LONGEST_PROBE_TOKENS]
    found = sorted({*TEXTS, *(window + PAST for window in windows)})
    return [tokens for tokens in found if tokens + 3 * PAST <= config.max_position_embeddings]


def _captured_equals_eager(model: Any, plan: MaskPlan, pool: BufferPool, nodes: int) -> bool:
    text = [number % 100 for number in range(TEXTS[1])]
    tree = TokenTree(text[-1])
    for first in range(0, nodes - 1, 3):
        tree.add_path([(first + depth) % 100 for depth in range(min(3, nodes - 1 - first))], "pool")
    runners = EagerRunner(model, plan, model.generation_config), GraphRunner(model, plan, model.generation_config, pool)
    found = []
    for runner in runners:
        cache: Any = runner.new_cache(tokens=2 * TEXTS[1] + nodes)
        runner.prefill([text[:-1]], cache)
        found.append(runner.forward([tree], [text], cache).clone())
        cache.reset()
    pool.free_idle()
    return torch.equal(*found)
