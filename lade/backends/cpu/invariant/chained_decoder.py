"""All decoder layers of a pass over a few tokens in one call.

Two calls a layer, its cache and its attention take as long as the products of a small model. Here the first layer of a
pass has one team of threads compute all of them, behind each other in one call:

    for each layer: projections, new keys and values into the cache, attention, what is behind it (`layer_stages`)

The layers after it find their results ready: each checks that it was called with what was foreseen, and only then are
its keys and values counted as cached. So modelling code runs as it is, and sees the same hidden states in between.

Where anything is unusual, layers compute themselves: hooks, another cache, masks that differ, many tokens, a cache that
has to grow. A trial compares both ways, bit for bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import groupby
from operator import is_, itemgetter
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
    add_layer,
    add_projections,
    head_norms_of,
    layers_behind,
    norms_of,
    projections_of,
)
from lade.backends.cpu.kernels import At, Stages, address_of, dtype_code, float_bits, kernel, parts_of
from lade.model.cache_layers import TreeLayer
from lade.model.facts import CACHE, SURVEYED
from lade.model.kv_cache import TreeCache
from lade.model.module_changes import Changed, change, has_own_forward

_UNUSUAL = FORMER_NAMES | {"dropout", "scaling", "softcap", "s_aux", "is_causal", "position_bias"}
"""Arguments of layers that change what attention computes."""
_TRIAL = (2, 3, 5)  # rows, cached tokens and tokens
MOST_SHAPES = 64  # shapes of passes whose calls are kept, some 0.1 MB each for 30 layers

# Indices among the numbers that a call is given. Those of all layers:
_X, _OUTS, _COS, _SIN, _SCRATCH, _ROOM, _ROW, _HEAD, _STEP, _FIRST = range(1, 11)
_MASK, _BLOCK, _BLOCKS, _SLOTS, _PARTS, _SHARED = 11, 15, 16, 17, 18, 19
# Those of each layer: its cache, then its weights before attention and behind it.
_KEYS, _VALUES, _WEIGHTS, _BEHIND, _OWN = 0, 1, 2, 11, 22


class _Made(NamedTuple):
    """Results of one call."""

    given: tuple[Any, Any, Any]  # rotary positions, mask and cache, as all layers must be given them
    layers: Sequence[Any]
    states: Sequence[torch.Tensor]  # [L + 1], each layer's input, and the last one's output, [B, S, H]
    cached: Sequence[TreeLayer]  # their layers of the cache
    lengths: list[int]  # [B], tokens of each row with the new ones


class _Run:
    """Layers that follow each other and are given the same, and the calls that were prepared for them."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = layers
        self._shapes = list(map(_shape_of, layers))
        self._known: dict[tuple[int, ...], Stages] = {}
        self._storages: list[Any] = []  # of weights; once emptied, all addresses are looked up in the next pass
        self._addresses, self._numbers = list[int](), array("q")

    def made(self, x: torch.Tensor, given: tuple[Any, Any, Any]) -> _Made | None:
        """Compute the layers, of which the first has the input `[B, S, H]`; None where they compute themselves."""
        (positions, mask, cache), attention = given, self.layers[0].self_attn
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
            mask = mask_of_all(batch, step, first + step, causal=getattr(attention, "is_causal", True))
        if not isinstance(mask, PlacedMask) or mask.shape != (batch, 1, step, first + step):
            return None
        outs = torch.empty(len(self.layers), *x.shape, dtype=x.dtype, device="cpu")
        heads, size = keys.shape[1], keys.shape[3]
        group = projections_of(attention)[0].out_features // (heads * size)
        split = AttentionSplit.of(batch, heads, group, step, size, size, first + step)
        (cos, sin), scratch, (row, head, each, _) = positions, split.scratch(), keys.stride()
        stages = self._stages(batch, step, cos.shape[0] * step)
        memory = torch.empty(stages.size, dtype=torch.int8, device="cpu")
        shared = (
            *(memory.data_ptr(), x.data_ptr(), outs.data_ptr(), cos.data_ptr(), sin.data_ptr()),
            *(scratch.data_ptr(), split.room),
            *(stride * x.itemsize for stride in (row, head, each)),
            *(first, *mask.addresses(batch, step, first + step)),
            *(split.block, split.blocks, split.slots, split.parts),
        )
        numbers = self._numbers_of(cached)
        numbers[:_SHARED] = array("q", shared)
        stages.run(numbers)
        return _Made(given, self.layers, [x, *outs.unbind()], cached, [length + step for length in lengths])

    def _cached(self, cache: TreeCache, x: torch.Tensor) -> list[TreeLayer]:
        """Return the layers' caches; empty if they are no alike buffers with room for the tokens of `[B, S, H]`."""
        held, indices = cache.layers, [layer.self_attn.layer_idx for layer in self.layers]
        if max(indices) >= len(held):
            return []
        (batch, step, _), cached = x.shape, [held[index] for index in indices]
        keys, lengths = getattr(cached[0], "keys", None), getattr(cached[0], "lengths", ())
        if keys is None or len(lengths) != batch or max(lengths) + step > keys.shape[2]:
            return []
        attention = self.layers[0].self_attn
        width = projections_of(attention)[1].out_features
        if (keys.shape[3], keys.shape[1] * keys.shape[3]) != (attention.head_dim, width):
            return []  # another model's
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
        if not self._storages or [each.data_ptr() for each in self._storages] != self._addresses:
            self._look_up()  # torch moves what it sends to another process
        numbers = self._numbers[:]
        for number, each in enumerate(cached):
            place = _SHARED + _OWN * number
            numbers[place + _KEYS], numbers[place + _VALUES] = address_of(each.keys), address_of(each.values)
        return numbers

    def _look_up(self) -> None:
        """Look up the addresses of all weights; see `PackedLinear.checked` for the errors raised."""
        given, storages = [each for layer in self.layers for each in _weights_of(layer)], dict[int, Any]()
        for each in given:
            if each is not None:
                storages[each.untyped_storage()._cdata] = each.untyped_storage()
        per_layer, found, numbers = _OWN - _WEIGHTS, array("q", map(address_of, given)), array("q", bytes(8 * _SHARED))
        for first in range(0, len(found), per_layer):
            numbers.extend((0, 0))
            numbers.extend(found[first : first + per_layer])
        self._numbers = numbers  # first: another thread may read them as soon as there are storages
        self._addresses = [each.data_ptr() for each in storages.values()]
        self._storages = list(storages.values())

    def _stages(self, batch: int, step: int, turns: int) -> Stages:
        """Return the stages of a pass over `[B, S]` tokens."""
        key = batch, step, turns, torch.get_num_threads()
        if key not in self._known:
            if len(self._known) == MOST_SHAPES:
                self._known.pop(next(iter(self._known)), None)
            stages, known = Stages(), dict[Any, tuple[int, Stages]]()
            linear = projections_of(self.layers[0].self_attn)[0]
            size = batch * step * linear.in_features * linear.dtype.itemsize
            for number, (layer, shape) in enumerate(zip(self.layers, self._shapes, strict=True)):
                kind = number > 0, shape
                if kind not in known:
                    own, of_layer = _SHARED + _OWN * number, Stages()
                    x = At(_OUTS, (number - 1) * size) if number else At(_X)
                    _add(of_layer, (batch, step, turns), layer, own, x, At(_OUTS, number * size))
                    known[kind] = number, of_layer
                first, of_layer = known[kind]
                stages.extend(of_layer, _OWN * (number - first), _SHARED, {_OUTS: (number - first) * size})
            self._known[key] = stages
        return self._known[key]


def _shape_of(layer: Any) -> Any:
    """Return what the stages of a layer are made of, but for the number of rows and its place among the others."""
    stages = Stages()
    _add(stages, (1, 2, 2), layer, _SHARED, At(_X), At(_OUTS))
    return stages.described


def _weights_of(layer: Any) -> list[torch.Tensor | None]:
    """Return the weights of a layer in the order of their addresses."""
    attention, (before, *behind) = layer.self_attn, norms_of(layer)
    found = list[torch.Tensor | None]()
    first = [before, *head_norms_of(attention)], projections_of(attention)
    for norms, layers in (first, (behind, layers_behind(layer))):
        found += [None if norm is None else norm._parameters["weight"] for norm in norms]
        for linear in layers:
            linear.follow_parameters()
            found += [linear._panel_weight.panels, linear._parameters["bias"]]
    return found


def _add(stages: Stages, tokens: tuple[int, int, int], layer: Any, own: int, x: At, out: At) -> None:
    """Add the stages of a layer; `own` is the index of the first of its numbers."""
    (batch, step, turns), attention = tokens, layer.self_attn
    linear, size, rows = projections_of(attention), attention.head_dim, batch * step
    kind, item = dtype_code(linear[0].dtype), linear[0].dtype.itemsize
    states = [stages.take(rows * each.out_features * item) for each in linear]
    heads, kv_heads, _ = (each.out_features // size for each in linear)
    positions = At(_COS), At(_SIN)
    add_projections(stages, rows, turns, attention, norms_of(layer)[0], x, positions, states, own + _WEIGHTS)
    query, key, value = states
    strides, buffers = [At(_ROW), At(_HEAD), At(_STEP)], [At(own + _KEYS), At(own + _VALUES)]
    stored = key, value, *buffers, *strides, At(_FIRST), batch, step, kv_heads, size * item  # NewStates
    stages.add(kernel("store_states"), parts_of(rows * kv_heads * size), stored)
    attended, softcap = stages.take(rows * heads * size * item), getattr(attention, "attn_logit_softcapping", None)
    fields = (  # an AttentionCall, see cpu_attention.h
        *(At(_SCRATCH), At(_ROOM), float_bits(attention.scaling), float_bits(softcap or 0.0)),
        *(query, *(item * each for each in (step * heads * size, size, heads * size)), kind),
        *(each for buffer in buffers for each in (buffer, *strides, kind)),
        *(At(_MASK + each) for each in range(4)),
        *(0, attended, kind),
        *(batch, kv_heads, heads // kv_heads, step, size, size, At(_BLOCK), At(_BLOCKS), At(_SLOTS)),
    )
    stages.add(kernel("attend"), At(_PARTS), fields)
    add_layer(stages, rows, layer, x, attended, own + _BEHIND, out)


class _Stack:
    """All layers of a decoder, in runs; copies start empty."""

    def __init__(self, modules: Any = None) -> None:
        self.runs = dict[int, _Run]()  # by the number of their first layer
        self.refused = False  # true if modelling code gives layers something else than the first one of their run
        self._modules, self._survey = modules, None
        self._relied_on: tuple[Any, int] = None, 0  # facts of a call, and hooks registered before
        if is_stack(modules):
            self._survey = Survey(modules)
            self.runs = {layers[0][0]: _Run([layer for _, layer in layers]) for layers in _runs_of(modules)}

    def __reduce__(self) -> Any:
        return _Stack, ()

    def follows(self, modules: Any) -> bool:
        """Return True if these are still the layers, with the parts that calls were prepared for."""
        return self._modules is modules and (self._is_relied_on or self._survey is None or self._survey.holds())

    def is_free(self) -> bool:
        """Return True if calls may compute the layers; only right if it `follows` them.

        To look at hundreds of modules takes a tenth of a pass, so passes of one call rely on its first one, unless a
        hook was added somewhere since.
        """
        if self._is_relied_on:
            return not self.refused
        free = self._survey is not None and self._survey.is_free()
        self._relied_on = (SURVEYED.now, RemovableHandle.next_id) if free else (None, 0)
        for run in self.runs.values():
            run._storages = []
        return free and not self.refused

    @property
    def _is_relied_on(self) -> bool:
        facts, hooks = self._relied_on
        return facts is not None and facts is SURVEYED.now and hooks == RemovableHandle.next_id


class DecoderPass:
    """One pass of a decoder, in which the first layer of a run computes for all; see `FusedLayer.forward`."""

    def __init__(self, decoder: ChainedDecoder) -> None:
        self._decoder = decoder
        self._number, self._start, self._fits = 0, 0, False
        self.made: _Made | None = None

    def output(self, layer: Any, x: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Return the output of the next layer, `[B, S, H]`; None if it has to compute itself."""
        number, self._number = self._number, self._number + 1
        given: Any = tuple(map(arguments.get, ARGUMENTS[1:]))
        run = self._run(number, layer, x, arguments)
        if run is not None:
            self._start, self.made = number, run.made(x, given)
        made, place = self.made, number - self._start
        if made is None:
            return None
        expected = place < len(made.layers) and layer is made.layers[place] and all(map(is_, given, made.given))
        if not expected or not (x is made.states[place] or place == 0) or not _UNUSUAL.isdisjoint(arguments):
            self.made, self._decoder._stack.refused = None, True
            return None
        made.cached[place].lengths = made.lengths
        return made.states[place + 1]

    def _run(self, number: int, layer: Any, x: torch.Tensor, arguments: dict[str, Any]) -> _Run | None:
        """Return the run that this layer is to compute; None if there is none."""
        if not few_rows(x) or not _UNUSUAL.isdisjoint(arguments):
            return None
        if number == 0:
            self._fits = self._decoder.is_fit()
        if not self._fits:
            return None
        run = self._decoder._stack.runs.get(number)
        return run if run is not None and run.layers[0] is layer and not self._decoder._stack.refused else None


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

    def is_fit(self) -> bool:
        """Return True if one call may compute layers, without gradients; it prepares for them if they are new."""
        modules = self._modules.get("layers")
        if not self._stack.follows(modules):
            self._stack = _Stack(modules)
        return self._stack.is_free()


def is_stack(modules: Any) -> bool:
    """Return True if these are layers that calls can compute."""
    if not isinstance(modules, nn.ModuleList) or len(modules) < 2:
        return False
    if not all(isinstance(layer, FusedLayer) and can_be_fused(layer) for layer in modules):
        return False
    layers: Any = modules
    linear = [each for layer in layers for each in (*projections_of(layer.self_attn), *layers_behind(layer))]
    return not any(each.keeps_original for each in linear)


def _runs_of(modules: Any) -> list[list[tuple[int, Any]]]:
    """Return the layers and their numbers, in runs of one type each: layers of a type get the same mask."""
    types = getattr(modules[0].self_attn.config, "layer_types", None) or [""] * len(modules)
    typed = zip(types, enumerate(modules), strict=False)
    return [[layer for _, layer in run] for _, run in groupby(typed, key=itemgetter(0))]


@torch.no_grad()
def fuse_decoder(decoder: Any) -> None:
    """Have the first layer of a decoder compute for all, in place, if a trial finds the same bits."""
    if has_own_forward(decoder) or not is_stack(decoder._modules.get("layers")):
        return
    change(decoder, ChainedDecoder)
    decoder._stack = _Stack(decoder.layers)
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
