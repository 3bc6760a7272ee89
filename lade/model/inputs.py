"""Inputs of a forward pass: size buckets, attention spans and masks, packed uploads to the device, root tokens.

    tokens   1   8   16   32   64   128   then multiples of 128
    rows     1   2   4   8   ...
    keys     256   384   512   768   1024   1536   2048   ...

A pass over a bucket costs as much as its largest member, and each bucket is one more graph to capture. For tokens the
overhead is negligible as long as the pass is bound by reading the weights. Keys are different: the bytes read from the
cache grow with their number, and a graph over the full capacity would read 32k tokens for a text of one thousand. Two
buckets per octave read at most 1.5 times the keys there are, 1.2 times on average, and a text that doubles its length
meets two new ones.

A copy to the device takes some ten microseconds whatever its size, and one from pageable memory synchronizes the host
with the device. From pinned memory it is queued like a kernel; torch's pinned allocator does not reuse a block before
the copy is done.

The base mask of a step is one boolean matrix: a node sees the cache, its ancestors and itself. Layers with a sliding
window or chunks see less, counted in *positions*: two nodes at the same depth are in different slots but equally far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig

from lade.decoding.tree import TokenTree
from lade.model.config import CHUNKED, FULL_ATTENTION, SLIDING, layer_windows
from lade.model.registry import Role

STEP_SIZES = (1, 8, 16, 32, 64, 128)
"""Buckets of passes up to 128 tokens."""
LARGEST_STEP = STEP_SIZES[-1]
LEAST_KEYS = 256


def step_bucket(tokens: int) -> int:
    """Return the size that a pass over `tokens` tokens per row is padded to."""
    return next((size for size in STEP_SIZES if size >= tokens), -(-tokens // LARGEST_STEP) * LARGEST_STEP)


def batch_bucket(rows: int) -> int:
    """Return the next power of two."""
    return 1 << (rows - 1).bit_length()


def key_bucket(tokens: int) -> int:
    """Return the number of cache slots that a pass reads if it needs the first `tokens` of them."""
    octave = max(LEAST_KEYS, batch_bucket(tokens))
    between = octave // 4 * 3
    return between if between > LEAST_KEYS and tokens <= between else octave


@dataclass(frozen=True)
class AttentionSpan:
    """Which keys a layer's queries see, by position; all of them by default.

    Attributes:
        window: number of positions seen, ending with the query's own; None for no window.
        chunk: size of the chunks that positions are divided into, of which a query sees its own; None for no chunks.
    """

    window: int | None = None
    chunk: int | None = None

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return whether each key is seen, bool `[B, S, K]`, given positions `[B, S, 1]` and `[B, 1, K]`."""
        if self.window:
            return query - key < self.window
        if self.chunk:
            return query // self.chunk == key // self.chunk
        return torch.ones(1, 1, 1, dtype=torch.bool, device=query.device)


FULL = AttentionSpan()
"""Full attention: all keys are seen."""


Array = npt.NDArray[Any]

_ALIGNMENT = 16
_TORCH_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.bool_): torch.bool}


class PackedLayout:
    """Arrays of known dtypes (int64, int32 or bool) and shapes, packed into one buffer."""

    def __init__(self, parts: Sequence[tuple[Any, Sequence[int]]]) -> None:
        self._parts: list[tuple[slice, np.dtype[Any], tuple[int, ...]]] = []
        end = 0
        for kind, shape in parts:
            dtype, start = np.dtype(kind), -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + dtype.itemsize * math.prod(shape)
            self._parts.append((slice(start, end), dtype, tuple(shape)))
        self.size_bytes = end

    def memory(self, device: torch.device, *, staged: bool = False) -> torch.Tensor:
        """Return a zeroed buffer, `[size_bytes]` uint8, on `device`; in host memory if `staged` for a copy to it."""
        options: dict[str, Any] = {"pin_memory": device.type == "cuda"} if staged else {"device": device}
        with torch.inference_mode(False):  # it is also written outside of inference mode
            return torch.zeros(self.size_bytes, dtype=torch.uint8, **options)

    def arrays(self, memory: torch.Tensor) -> list[Array]:
        """Return the arrays as views of a buffer in host memory."""
        whole = memory.numpy()
        return [whole[span].view(dtype).reshape(shape) for span, dtype, shape in self._parts]

    def tensors(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the arrays as tensor views of a buffer on any device."""
        return [memory[span].view(_TORCH_DTYPES[dtype]).view(shape) for span, dtype, shape in self._parts]


def upload(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Return arrays (int64, int32 or bool) as tensors on the device, by one asynchronous copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]  # nothing to copy
    layout = PackedLayout([(array.dtype, array.shape) for array in arrays])
    host = layout.memory(device, staged=True)
    for place, array in zip(layout.arrays(host), arrays, strict=True):
        place[...] = array
    return layout.tensors(host.to(device, non_blocking=True))


def filled(columns: Sequence[list[int]], held: Sequence[int], length: int) -> npt.NDArray[np.int64]:
    """Return lists without their first `held[b]` numbers as rows `[B, length]`, padded with their first number."""
    rows = zip(columns, held, strict=True)
    return np.array([column[own:] + column[:1] * (length - len(column) + own) for column, own in rows], dtype=np.int64)


@dataclass(frozen=True)
class RootInputs:
    """Tensors of a step that feeds the root alone in each of B rows; K = max(P) + 1.

    A single row needs no mask where a layer sees the whole text, so that the model takes the same path as in plain
    decoding.

    Attributes:
        ids, positions: `[B, 1]` int64.
        slots: K, the number of slots of the cache and of the step.
        allowed: `[B, 1, 1, K]` bool, the slots each token may see; None for a single row, which sees all.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: int
    allowed: torch.Tensor | None = None

    @classmethod
    def of(cls, tokens: Sequence[int], lengths: Sequence[int], device: torch.device) -> RootInputs:
        """Build the inputs for one token per row, after `lengths[b]` cached ones."""
        slots = max(lengths) + 1
        if len(tokens) == 1:
            ids, positions = (torch.full((1, 1), number, device=device) for number in (*tokens, *lengths))
            return cls(ids, positions, slots)
        before = np.array(lengths)[:, None]
        allowed = np.arange(slots) < before
        allowed[:, -1] = True  # the slot of the tokens that are fed
        ids, positions, seen = upload((np.array(tokens)[:, None], before, allowed[:, None, None]), device)
        return cls(ids, positions, slots, seen)

    @property
    def key_positions(self) -> torch.Tensor:
        """Position of every slot of the cache and of the step, `[B, K]` int64."""
        cached = torch.arange(self.slots - 1, device=self.ids.device).expand(len(self.ids), -1)
        return torch.cat([cached, self.positions], dim=1)

    def mask(self, span: AttentionSpan) -> torch.Tensor | None:
        """Return the slots within `span` that each token may see, `[B, 1, 1, K]` bool; None if it sees all."""
        if span == FULL:
            return self.allowed
        near = span(self.positions[:, :, None], self.key_positions[:, None, :])[:, None]
        return near if self.allowed is None else near & self.allowed


Mask = torch.Tensor | None | dict[str, torch.Tensor | None]

TREE_ATTENTION, INVARIANT_ATTENTION = "lade_tree", "lade_invariant"
OWN_ATTENTION = (TREE_ATTENTION, INVARIANT_ATTENTION)
"""Names under which this package registers its attention implementations with transformers."""


class Inputs(Protocol):
    """Tensors of one step over B trees."""

    @property
    def ids(self) -> torch.Tensor:
        """Token ids, `[B, S]` int64."""

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the tokens, `[B, S]` int64."""

    @property
    def key_positions(self) -> torch.Tensor:
        """Position of every slot of the cache and of the step, `[B, K]` int64."""

    def mask(self, span: AttentionSpan) -> torch.Tensor | None:
        """Return the slots that each node may see, `[B, 1, S, K]` bool; None if it sees all."""


class _TreeMasks(Protocol):
    def inputs(self, trees: Sequence[TokenTree], lengths: Sequence[int], device: torch.device, held: int) -> Inputs: ...


class _PlacedMasks(Protocol):
    def placed_mask(self, allowed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor: ...


TREE_MASKS: Role[_TreeMasks] = Role("tree masks")
PLACED_MASKS: Role[_PlacedMasks] = Role("placed masks")


@dataclass(frozen=True)
class StepInputs:
    """Tensors of one step over B trees; S is the largest number of nodes to feed, K = max(P) + S.

    Attributes:
        ids, positions: `[B, S]` int64; rows with fewer nodes are padded with copies of their root.
        key_positions: `[B, K]` int64, position of every slot of the cache and of the step.
        allowed: `[B, S, K]` bool, the slots that each node may see.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    key_positions: torch.Tensor
    allowed: torch.Tensor

    @classmethod
    def of(
        cls, trees: Sequence[TokenTree], lengths: Sequence[int], device: torch.device, held: Sequence[int] | None = None
    ) -> StepInputs:
        """Combine one tree per row; the tokens fed are appended after the longest row, of `lengths[b]` cached tokens.

        The last `held[b]` of these are the first nodes of the row's tree, and are not fed again; None for zeros.
        """
        held = held or [0] * len(trees)
        if len(trees) == 1:
            return cls._of_single_row(trees[0], lengths[0], held[0], device)
        rows, first = len(trees), max(lengths)
        step = max(len(tree) - own for tree, own in zip(trees, held, strict=True))
        before = (np.array(lengths) - np.array(held))[:, None]  # [B, 1], tokens in front of the trees
        ids, depths = (filled(columns, held, step) for columns in ([t.ids for t in trees], [t.depths for t in trees]))
        positions = depths + before
        slots, nodes = np.arange(first), np.arange(step)
        key_positions = np.concatenate([np.broadcast_to(slots, (rows, first)), positions], axis=1)
        allowed = np.zeros((rows, step, first + step), dtype=np.bool_)
        allowed[:, :, :first] = (slots < before)[:, None]
        allowed[:, nodes, first + nodes] = True  # padding sees itself too, so that no softmax is empty
        for row, (tree, own) in enumerate(zip(trees, held, strict=True)):
            if len(tree) > 1:
                closure, size = tree.closure()[own:], len(tree) - own
                allowed[row, :size, first : first + size] = closure[:, own:]
                allowed[row, :size, lengths[row] - own : lengths[row]] = closure[:, :own]
                key_positions[row, lengths[row] - own : lengths[row]] = before[row] + tree.depths[:own]
        return cls(*upload((ids, positions, key_positions, allowed), device))

    @classmethod
    def _of_single_row(cls, tree: TokenTree, length: int, held: int, device: torch.device) -> StepInputs:
        """Build the tensors for a single row, which needs no padding."""
        before, size = length - held, len(tree)
        key_positions = np.arange(before + size)[None]
        positions = key_positions[:, before:]
        positions[:] = tree.depths
        positions += before
        allowed = np.ones((1, size - held, before + size), dtype=np.bool_)
        allowed[:, :, before:] = tree.closure()[held:]
        return cls(*upload((np.array([tree.ids[held:]]), positions[:, held:], key_positions, allowed), device))

    def mask(self, span: AttentionSpan) -> torch.Tensor:
        """Return the slots within `span` that each node may see, `[B, 1, S, K]` bool."""
        if span == FULL:
            return self.allowed[:, None]
        near = span(self.positions[:, :, None], self.key_positions[:, None, :])
        return (self.allowed & near)[:, None]


@dataclass(frozen=True)
class MaskPlan:
    """The mask format of a model.

    Attributes:
        spans: attention span by layer type; None for layers without a mask, such as recurrent ones.
        by_layer_type: whether the model takes a dict of masks keyed by layer type; otherwise it has one type only.
        additive: whether masks are added to the scores (eager attention) or boolean (SDPA).
        compact: whether its attention takes a `TreeMask`.
        placed: whether its attention needs a `PlacedMask`.
        pads: whether no token affects those before it, so that prompts may be padded on the right.
    """

    spans: Mapping[str, AttentionSpan | None]
    by_layer_type: bool
    additive: bool
    compact: bool = False
    placed: bool = False
    pads: bool = False

    @cached_property
    def attends(self) -> bool:
        """True if any layer takes a mask."""
        return any(span is not None for span in self.spans.values())

    def inputs(
        self,
        trees: Sequence[TokenTree],
        lengths: Sequence[int],
        device: torch.device,
        held: Sequence[int] | None = None,
    ) -> Inputs:
        """Build the inputs of one step over one tree per row, see `StepInputs.of`.

        In a batch whose rows hold nodes, these are not adjacent to those fed, which a `TreeMask` cannot express: such
        steps use dense masks, which every attention implementation takes.
        """
        if self.compact and (len(trees) == 1 or not any(held or ())):
            return TREE_MASKS.load().inputs(trees, lengths, device, sum(held or ()))
        return StepInputs.of(trees, lengths, device, held)

    def masks(self, inputs: Inputs, dtype: torch.dtype) -> Mask:
        """Return the masks `[B, 1, S, K]` of one step; additive ones in `dtype`, the model's."""
        masks = {kind: None if span is None else self._shaped(inputs, span, dtype) for kind, span in self.spans.items()}
        return masks if self.by_layer_type else next(iter(masks.values()))

    def _shaped(self, inputs: Inputs, span: AttentionSpan, dtype: torch.dtype) -> torch.Tensor | None:
        allowed = inputs.mask(span)
        if allowed is None:
            return None
        if self.placed:
            return PLACED_MASKS.load().placed_mask(allowed, inputs.key_positions)
        if not self.additive:
            return allowed
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


INDEXED = frozenset({"indexed_attention", "deepseek_sparse_attention"})
"""Names of the layer type in current and older versions of transformers."""


LAYER_TYPES = frozenset({SLIDING, CHUNKED, FULL_ATTENTION}) | INDEXED
RECURRENT_TYPES = frozenset({"linear_attention", "conv", "hybrid", "moe", "mlp"})
"""Layer types of models with recurrent layers; the last two keep no state."""


def plan_for(config: PretrainedConfig, *, by_layer_type: bool) -> MaskPlan:
    """Return the mask format of a model with this text config; see `MaskPlan` for `by_layer_type`.

    Raises:
        ValueError: layers that share a mask have different spans; the message is the reason, a phrase to follow "it".
    """
    spans: dict[str, AttentionSpan | None] = {}
    layers = layer_windows(config)
    if by_layer_type:
        for kind in sorted({kind for kind, _ in layers}):
            window = _common_window(window for each, window in layers if each == kind)
            seen = AttentionSpan(chunk=window) if kind == CHUNKED else AttentionSpan(window)
            spans[kind] = None if kind in RECURRENT_TYPES else seen
    else:
        # A model without layer types in its masks does not mask by them. But transformers' cache follows them, and
        # keeps only the last tokens for a layer with a window or with chunks.
        window = _common_window(window for _, window in layers)
        attends = any(kind == "hybrid" or kind not in RECURRENT_TYPES for kind, _ in layers)
        spans["attention"] = AttentionSpan(window) if attends else None
    backend = config._attn_implementation
    return MaskPlan(
        spans,
        by_layer_type,
        additive=backend not in ("sdpa", *OWN_ATTENTION),
        compact=backend == TREE_ATTENTION,
        placed=backend == INVARIANT_ATTENTION,
    )


def _common_window(windows: Iterable[int | None]) -> int | None:
    found = set(windows)
    if len(found) > 1:
        raise ValueError(f"takes one mask for layers with different windows ({sorted(map(str, found))})")
    return found.pop()
