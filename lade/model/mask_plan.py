"""The mask plan of a model, by its configuration."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PretrainedConfig

from lade.model.attention_span import FULL, AttentionSpan, chunked, sliding
from lade.model.config_fields import field, per_layer
from lade.model.invariant_attention.attention import NAME as INVARIANT_ATTENTION
from lade.model.masks import MaskPlan
from lade.model.tree_attention.backend import NAME as TREE_ATTENTION

SLIDING, CHUNKED, FULL_ATTENTION = "sliding_attention", "chunked_attention", "full_attention"
LAYER_TYPES = frozenset({SLIDING, CHUNKED, FULL_ATTENTION})
RECURRENT_TYPES = frozenset({"linear_attention", "conv", "hybrid", "moe", "mlp"})
"""Of models with recurrent layers; the last two hold nothing of the text."""
INDEXED = "indexed_attention"
_FIELDS = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}


def plan_for(config: PretrainedConfig, *, by_layer_type: bool) -> MaskPlan:
    """The masks of a model with this text config.

    Args:
        config: the text config.
        by_layer_type: whether the model takes a dict of masks, one for each layer type, or one mask for all layers.

    Raises:
        ValueError: layers that take the same mask see differently far; the message is the reason, as a
            phrase that continues "it ...".
    """
    spans: dict[str, AttentionSpan | None] = {}
    layers = _layers(config)
    if by_layer_type:
        for kind in sorted({kind for kind, _ in layers}):
            window = _only(window for each, window in layers if each == kind)
            seen = FULL if window is None else chunked(window) if kind == CHUNKED else sliding(window)
            spans[kind] = None if kind in RECURRENT_TYPES else seen
    else:
        # A model that knows of no layer types does not mask by them. But the cache of plain decoding goes by them, and
        # holds the last tokens only of a layer with a window or with chunks.
        window = _only(window for _, window in layers)
        spans["attention"] = FULL if window is None else sliding(window)
    backend = config._attn_implementation
    return MaskPlan(
        spans,
        by_layer_type,
        additive=backend not in ("sdpa", TREE_ATTENTION, INVARIANT_ATTENTION),
        compact=backend == TREE_ATTENTION,
        placed=backend == INVARIANT_ATTENTION,
    )


def window_too_short(config: PretrainedConfig) -> str:
    """The field and value of a window of fewer than two tokens; empty if there is none.

    The cache of plain decoding keeps the last `window - 1` tokens as `[-window + 1:]`, which for a window of 1 are all
    of them: prompts are masked, and what follows sees everything. Shorter ones fail.
    """
    for kind, window in _layers(config):
        if window is not None and window < 2:
            return f"{_FIELDS[kind]}={window}"
    return ""


def windows_of(config: PretrainedConfig) -> set[int]:
    """Lengths of the sliding windows and chunks of the layers."""
    return {window for _, window in _layers(config) if window is not None}


def _layers(config: PretrainedConfig) -> list[tuple[str, int | None]]:
    """Type and window of each layer, as transformers' own cache reads them."""
    pairs = list(zip(_lengths(config, _FIELDS[SLIDING]), _lengths(config, _FIELDS[CHUNKED]), strict=True))
    kinds = field(config, "layer_types") or [
        SLIDING if window is not None else CHUNKED if chunk is not None else FULL_ATTENTION for window, chunk in pairs
    ]
    windows = ({SLIDING: window, CHUNKED: chunk} for window, chunk in pairs)
    return [(kind, window.get(kind)) for kind, window in zip(kinds, windows, strict=False)]


def _lengths(config: PretrainedConfig, name: str) -> list[int | None]:
    return [length if isinstance(length, int) else None for length in per_layer(config, name)]


def _only(windows: Iterable[int | None]) -> int | None:
    found = set(windows)
    if len(found) > 1:
        raise ValueError(f"takes one mask for layers that see differently far ({sorted(map(str, found))})")
    return found.pop()
