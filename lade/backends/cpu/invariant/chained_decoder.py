"""All decoder layers of a pass over a few tokens in one call.

Two calls a layer, its cache and its attention take as long as the products of a small model. Here the first layer of a
pass has one team of threads compute all of them, behind each other in one call:

    for each layer: projections, new keys and values into the cache, attention, what is behind it (`fused.py`)

The layers after it find their results ready: each checks that it was called with what was foreseen, and only then are
its keys and values counted as cached. So modelling code runs as it is, and sees the same hidden states in between.

Where anything is unusual, layers compute themselves: hooks, another cache, masks that differ, many tokens, a cache that
has to grow. A trial compares both ways, bit for bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lade.backends.cpu.invariant.attention import AttentionSplit, PlacedMask, mask_of_all
from lade.backends.cpu.invariant.fused import (
    AHEAD,
    ARGUMENTS,
    FORMER_NAMES,
    FusedLayer,
    Survey,
    can_be_fused,
    few_rows,
    fits,
    seeded,
)
from lade.backends.cpu.invariant.layer_stages import (
    HEAD_NORMS,
    StagePlaces,
    add_layer,
    add_projections,
    layers_behind,
    norms_of,
    projections_of,
)
from lade.backends.cpu.kernels import address_of, dtype_code, kernel
from lade.backends.cpu.worker_threads import At, Room, Stages, float_bits, parts_of
from lade.model.cache_layers import TreeLayer
from lade.model.facts import CACHE, SURVEYED
from lade.model.in_place_subclassing import Changed, change, has_own_forward
from lade.model.kv_cache import TreeCache

_UNUSUAL = FORMER_NAMES | {"dropout", "scaling", "softcap", "s_aux", "is_causal", "position_bias"}
"""Arguments of layers that change what attention computes."""
_TRIAL = (2, 3, 5)  # rows, cached tokens and tokens

# Indices among the numbers that a call is given. Those of all layers:
_MEMORY, _X, _OUTS, _COS, _SIN, _SCRATCH, _ROOM, _ROW, _HEAD, _STEP, _FIRST = range(11)
_MASK, _BLOCK, _BLOCKS, _SLOTS, _PARTS, _SHARED = 11, 15, 16, 17, 18, 19
# Those of each layer: its cache, then its weights.
_KEYS, _VALUES, _WEIGHTS, _OWN = 0, 1, 2, 20
_NORM, _PROJECTIONS, _NORM_BEHIND, _BEHIND = 2, 5, 11, 12


class _Made(NamedTuple):
    """Results of one call.

    Attributes:
        given: rotary positions, mask and cache, as all layers must be given them.
        layers: the layers.
        states: `[L + 1]`, each layer's input, and the last one's output, `[B, S, H]`.
        cached: their layers of the cache.
        lengths: `[B]`, tokens of each row with the new ones.
    """

    given: tuple[Any, Any, Any]
    layers: Sequence[Any]
    states: Sequence[torch.Tensor]
    cached: Sequence[TreeLayer]
    lengths: list[int]


class _Stack:
    """The layers of a decoder, and the calls that were prepared for them; copies start empty.

    Attributes:
        refused: true if the modelling code gives layers something else than the first one.
    """

    def __init__(self) -> None:
        self.refused = False
        self._modules: Any = None
        self._layers: list[Any] = []
        self._known: dict[tuple[int, ...], tuple[Stages, int]] = {}
        self._survey: Survey | None = None
        self._looked_up = False
        self._storages: list[Any] = []  # of weights
        self._addresses, self._numbers = list[int](), array("q")
        self._relied_on: tuple[Any, int] = None, 0  # facts of a call, and hooks registered before

    def __reduce__(self) -> Any:
        return _Stack, ()

    def is_fit(self, modules: Any) -> bool:
        """Return True if these are layers that one call may compute; it prepares for them if they are new.

        To look at hundreds of modules takes a tenth of a pass, so passes of one call rely on its first one, unless a
        hook was added somewhere since.
        """
        facts, hooks, (relied_on, before) = SURVEYED.now, RemovableHandle.next_id, self._relied_on
        if facts is None or relied_on is not facts or hooks != before or self._modules is not modules:
            if self._modules is not modules or (self._survey is not None and not self._survey.holds()):
                self.__init__()  # type: ignore[misc]
                self._modules = modules
                if is_stack(modules):
                    self._layers, self._survey = list(modules), Survey(modules)
            if self._survey is None or not self._survey.is_free():
                self._relied_on = None, 0
                return False
            self._relied_on, self._looked_up = (facts, hooks), False
        return not self.refused

    def made(self, x: torch.Tensor, given: tuple[Any, Any, Any]) -> _Made | None:
        """Compute all layers; None where they have to compute themselves.

        Args:
            x: `[B, S, H]`, input of the first layer.
            given: rotary positions, mask and cache.
        """
        (positions, mask, cache), attention = given, self._layers[0].self_attn
        if type(cache) is not TreeCache or not fits(attention, x, positions):
            return None
        x = projections_of(attention)[0].checked(x).contiguous()
        cached = self._cached(cache, x)
        if not cached:
            return None
        lengths, keys = cached[0].lengths, cached[0].keys
        (batch, step, _), first = x.shape, max(lengths)
        assert keys is not None
        if mask is None:
            mask = mask_of_all(batch, step, first + step, causal=attention.is_causal)
        if not isinstance(mask, PlacedMask) or mask.shape != (batch, 1, step, first + step):
            return None
        outs = torch.empty(len(self._layers), *x.shape, dtype=x.dtype, device="cpu")
        heads, size = keys.shape[1], keys.shape[3]
        group = projections_of(attention)[0].out_features // (heads * size)
        split = AttentionSplit.of(batch, heads, group, step, size, size, first + step)
        (cos, sin), scratch, (row, head, each, _) = positions, split.scratch(), keys.stride()
        stages, room = self._stages(batch, step, cos.shape[0] * step)
        memory = torch.empty(room, dtype=torch.int8, device="cpu")
        numbers = self._numbers_of(cached)
        numbers[:_SHARED] = array(
            "q",
            (
                *(memory.data_ptr(), x.data_ptr(), outs.data_ptr(), cos.data_ptr(), sin.data_ptr()),
                *(scratch.data_ptr(), split.room),
                *(stride * x.itemsize for stride in (row, head, each)),
                *(first, *mask.addresses(batch, step, first + step)),
                *(split.block, split.blocks, split.slots, split.parts),
            ),
        )
        stages.run(numbers)
        return _Made(given, self._layers, [x, *outs.unbind()], cached, [length + step for length in lengths])

    def _cached(self, cache: TreeCache, x: torch.Tensor) -> list[TreeLayer]:
        """Return the layers' caches; empty if they are no alike buffers with room for the tokens of `[B, S, H]`."""
        held, indices = cache.layers, [layer.self_attn.layer_idx for layer in self._layers]
        if max(indices) >= len(held):
            return []
        (batch, step, _), cached = x.shape, [held[index] for index in indices]
        keys, lengths = getattr(cached[0], "keys", None), getattr(cached[0], "lengths", ())
        if keys is None or len(lengths) != batch or max(lengths) + step > keys.shape[2]:
            return []
        layout = keys.shape, keys.stride(), x.dtype
        for each in cached:
            if type(each) is not TreeLayer or each.lengths != lengths or each.indexer_keys is not None:
                return []
            for buffer in (each.keys, each.values):
                if buffer is None or (buffer.shape, buffer.stride(), buffer.dtype) != layout:
                    return []
        return cached

    def _numbers_of(self, cached: Sequence[TreeLayer]) -> array[int]:
        """Return the numbers of a call, with those of each layer filled in."""
        if not self._looked_up or [each.data_ptr() for each in self._storages] != self._addresses:
            self._look_up()  # torch moves what it sends to another process
        numbers = self._numbers[:]
        for number, each in enumerate(cached):
            place = _SHARED + _OWN * number
            numbers[place + _KEYS], numbers[place + _VALUES] = address_of(each.keys), address_of(each.values)
        return numbers

    def _look_up(self) -> None:
        """Look up the addresses of all weights; see `PackedLinear.checked` for the errors raised."""
        given, storages = [each for layer in self._layers for each in _weights_of(layer)], dict[int, Any]()
        for each in given:
            if each is not None:
                storages[each.untyped_storage()._cdata] = each.untyped_storage()
        self._storages = list(storages.values())
        self._addresses, self._looked_up = [each.data_ptr() for each in self._storages], True
        per_layer, found = _OWN - _WEIGHTS, array("q", map(address_of, given))
        self._numbers = array("q", bytes(8 * _SHARED))
        for first in range(0, len(found), per_layer):
            self._numbers.extend((0, 0))
            self._numbers.extend(found[first : first + per_layer])

    def _stages(self, batch: int, step: int, turns: int) -> tuple[Stages, int]:
        """Return the stages of a pass over `[B, S]` tokens, and the bytes of memory that they need."""
        key = batch, step, turns, torch.get_num_threads()
        if key not in self._known:
            stages, most, out = Stages(), 0, At(_X)
            for number, layer in enumerate(self._layers):
                room, before = Room(_MEMORY), out  # layers use the same memory one after the other
                out = At(_OUTS, number * _bytes_of(layer, batch * step))
                _add(stages, room, (batch, step, turns), layer, _SHARED + _OWN * number, before, out)
                most = max(most, room.size)
            self._known[key] = stages, most
        return self._known[key]


def _bytes_of(layer: Any, rows: int) -> int:
    first = projections_of(layer.self_attn)[0]
    return int(rows * first.in_features * first.dtype.itemsize)


def _weights_of(layer: Any) -> list[torch.Tensor | None]:
    """Return the weights of a layer in the order of their addresses."""
    attention, (before, behind) = layer.self_attn, norms_of(layer)
    norms = [before, *(attention._modules.get(name) for name in HEAD_NORMS), behind]
    of_norms = [None if norm is None else norm._parameters["weight"] for norm in norms]
    pairs = []
    for linear in (*projections_of(attention), *layers_behind(layer)):
        linear.follow_parameters()
        pairs += [linear._panel_weight.panels, linear._parameters["bias"]]
    return [*of_norms[:3], *pairs[:6], of_norms[3], *pairs[6:]]


def _add(stages: Stages, room: Room, tokens: tuple[int, int, int], layer: Any, own: int, x: At, out: At) -> None:
    """Add the stages of a layer; `own` is the index of the first of its numbers."""
    (batch, step, turns), attention = tokens, layer.self_attn
    linear, size, rows = projections_of(attention), attention.head_dim, batch * step
    kind, item = dtype_code(linear[0].dtype), linear[0].dtype.itemsize
    states = [room.take(rows * each.out_features * item) for each in linear]
    heads, kv_heads, _ = (each.out_features // size for each in linear)
    norms = [At(own + _NORM + each) for each in range(3)]
    places = StagePlaces(x, (At(_COS), At(_SIN)), norms, own + _PROJECTIONS, states)
    add_projections(stages, room, rows, turns, attention, norms_of(layer)[0], places)
    query, key, value = states
    strides, buffers = [At(_ROW), At(_HEAD), At(_STEP)], [At(own + _KEYS), At(own + _VALUES)]
    stored = key, value, *buffers, *strides, At(_FIRST), batch, step, kv_heads, size * item  # NewStates
    stages.add(kernel("store_states"), parts_of(rows * kv_heads * size), stored)
    attended, softcap = room.take(rows * heads * size * item), getattr(attention, "attn_logit_softcapping", None)
    fields = (  # an AttentionCall, see cpu_attention.h
        *(At(_SCRATCH), At(_ROOM), float_bits(attention.scaling), float_bits(softcap or 0.0)),
        *(query, *(item * each for each in (step * heads * size, size, heads * size)), kind),
        *(each for buffer in buffers for each in (buffer, *strides, kind)),
        *(At(_MASK + each) for each in range(4)),
        *(0, attended, kind),
        *(batch, kv_heads, heads // kv_heads, step, size, size, At(_BLOCK), At(_BLOCKS), At(_SLOTS)),
    )
    stages.add(kernel("attend"), At(_PARTS), fields)
    add_layer(stages, room, rows, layer, x, attended, At(own + _NORM_BEHIND), own + _BEHIND, out)


class DecoderPass:
    """One pass of a decoder, in which the first layer computes for all; see `FusedLayer.forward`."""

    def __init__(self, decoder: ChainedDecoder) -> None:
        self._decoder = decoder
        self._number = 0
        self.made: _Made | None = None

    def output(self, layer: Any, x: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Return the output of the next layer, `[B, S, H]`; None if it has to compute itself."""
        number, self._number = self._number, self._number + 1
        given = tuple(map(arguments.get, ARGUMENTS[1:]))
        if number == 0:
            self.made = self._decoder.made(layer, x, given, arguments)
        made = self.made
        if made is None:
            return None
        expected = (
            number < len(made.layers) and layer is made.layers[number] and (x is made.states[number] or not number)
        )
        if not expected or not all(map(is_, given, made.given)) or not _UNUSUAL.isdisjoint(arguments):
            self.made, self._decoder._stack.refused = None, True
            return None
        made.cached[number].lengths = made.lengths
        return made.states[number + 1]


class ChainedDecoder(Changed):
    """Mixin for the class of a decoder whose layers one call can compute."""

    _stack: _Stack

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the decoder; arguments are those of transformers' decoders."""
        outer, AHEAD.now = AHEAD.now, DecoderPass(self)
        try:
            return self.original.forward(self, *args, **kwargs)
        finally:
            AHEAD.now = outer

    def made(self, layer: Any, x: torch.Tensor, given: tuple[Any, ...], arguments: dict[str, Any]) -> _Made | None:
        """Compute all layers if this is the first one, and nothing is unusual; see `_Stack.made`."""
        stack, modules = self._stack, self._modules.get("layers")
        if not few_rows(x) or not _UNUSUAL.isdisjoint(arguments) or not stack.is_fit(modules):
            return None
        return stack.made(x, given) if layer is modules[0] else None  # type: ignore[index]


def is_stack(modules: Any) -> bool:
    """Return True if these are layers that one call can compute, all given the same mask."""
    if not isinstance(modules, nn.ModuleList) or len(modules) < 2:
        return False
    if not all(isinstance(layer, FusedLayer) and can_be_fused(layer) for layer in modules):
        return False
    layers: Any = modules
    if len(set(getattr(layers[0].self_attn.config, "layer_types", None) or ())) > 1:
        return False
    linear = [each for layer in layers for each in (*projections_of(layer.self_attn), *layers_behind(layer))]
    return not any(each.keeps_original for each in linear)


@torch.no_grad()
def fuse_decoder(decoder: Any) -> None:
    """Have the first layer of a decoder compute for all, in place, if a trial finds the same bits."""
    if has_own_forward(decoder) or not is_stack(decoder._modules.get("layers")):
        return
    change(decoder, ChainedDecoder)
    decoder._stack = _Stack()
    if not _is_same(decoder):
        decoder.__class__ = decoder.original


def _is_same(decoder: Any) -> bool:
    """Return True if layers have the same outputs and caches, bit for bit, as when each computes itself."""
    rows, cached, step = _TRIAL
    layers: Any = decoder.layers
    first = projections_of(layers[0].self_attn)[0]
    size, width, dtype = layers[0].self_attn.head_dim, first.in_features, first.dtype
    found = list[list[torch.Tensor]]()
    for ahead in (None, DecoderPass(decoder)):
        cache, seen = TreeCache(), list[torch.Tensor]()
        for tokens, now in ((cached, None), (step, ahead)):
            positions = seeded(2, 1, tokens, size, dtype=dtype).unbind()
            x, AHEAD.now = seeded(rows, tokens, width, dtype=dtype), now
            try:
                for layer in layers:
                    x = layer(x, position_embeddings=positions, attention_mask=None, **{CACHE: cache})
                    seen.append(x)
            finally:
                AHEAD.now = None
        used = cached + step
        buffers = (buffer for each in cache.attending for buffer in each.buffers.values())
        found.append([*seen, *(buffer[:, :, :used] for buffer in buffers)])
    made: bool = ahead is not None and ahead.made is not None
    return made and all(map(torch.equal, *found))
