"""Decoder layers, attention's projections and gated blocks in as few calls as possible.

Of few rows, the operations of a layer take hardly longer than their calls from Python. One team of threads runs many of
them one after the other here, with the same bits: products in panels, norms and activations are those of the modules
themselves, and what is rounded to the model's dtype is rounded after the same operations.

A gated block takes one call, and so do the projections of attention. A decoder layer takes one before its cache and
attention, and one behind them. What they compute is drawn in `layer_stages`.

A module is recognised by the names of its layers, and by a trial: its own forward must give the same bits. Its own
forward also takes over where a layer has hooks or was replaced, and for many rows, where calls do not matter.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from threading import local
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import DynamicCache

from lade.backends.cpu.invariant.attention import invariant_attention
from lade.backends.cpu.invariant.functions import InvariantNorm, epsilon_of, logistic_of
from lade.backends.cpu.invariant.layer_stages import (
    GATED,
    LAYER_NORMS,
    PROJECTED,
    add_block,
    add_layer,
    add_projections,
    head_norms_of,
    layers_behind,
    layers_of,
    norms_of,
    projections_of,
)
from lade.backends.cpu.kernels import WIDEST, At, Stages, is_plain
from lade.backends.cpu.packing.integers import GgufLinear, Int4Linear, Int8Linear
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.cpu.packing.weight import PREPARED_ROWS, TILE_PANEL
from lade.model.facts import CACHE, CACHE_NAMES
from lade.model.inputs import INVARIANT_ATTENTION
from lade.model.module_changes import Changed, change

_KINDS = (PackedLinear, Int8Linear, Int4Linear, GgufLinear)
_DTYPES = (torch.float32, torch.bfloat16)
ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask", CACHE)
FORMER_NAMES = frozenset(CACHE_NAMES) - {CACHE}
_TRIAL = (2, 5)  # rows and tokens
_LAYERS = [{"self_attn", "mlp", *filter(None, names)} for names in LAYER_NORMS]  # children of a decoder layer
_X, _OUT, _MORE = 1, 2, 3  # indices among the addresses of a call


class Survey:
    """The modules in a module, as they were when stages were prepared for them.

    Its methods are called in each pass, so they make few calls for each of the modules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [(each._modules, name) for each in module.modules() for name in each._modules]
        self._parts = [modules[name] for modules, name in self._places]
        present = [part for part in self._parts if part is not None]
        self._own, self._parameters = list(map(vars, present)), [part._parameters for part in present]
        self._weights = [each.get("weight") for each in self._parameters]
        self._ids = list(map(id, self._weights))
        self._norms = [part for part in self._parts if isinstance(part, InvariantNorm)]
        self._fixed = list(map(_fixed, self._norms))

    def holds(self) -> bool:
        """Return True if all modules are still there, with their weights and with what stages have of the norms."""
        if [modules.get(name) for modules, name in self._places] != self._parts:
            return False
        same = [id(each.get("weight")) for each in self._parameters] == self._ids
        return same and list(map(_fixed, self._norms)) == self._fixed

    def is_free(self) -> bool:
        """Return True if none has hooks or a `forward` of its own, which would notice that it is not called."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return False
        return not any(own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own for own in self._own)


class _Calls:
    """Prepared calls of a module; copies start empty."""

    def __init__(self) -> None:
        # Stages by rows, threads and what else they depend on; shared by modules of one shape.
        self.known: dict[tuple[Any, ...], Stages] = {}
        self.survey: Survey | None = None  # what stages were prepared for; None if not yet, or if there are none

    def __reduce__(self) -> Any:
        return _Calls, ()

    def of(self, add_stages: Any, *key: int, given: tuple[Any, ...]) -> Stages:
        """Return the stages of a call; the key begins with its rows."""
        whole = add_stages, *key, torch.get_num_threads()
        stages = self.known.get(whole)
        if stages is None:
            stages = Stages()
            add_stages(stages, *key, *given)
            self.known[whole] = stages
        return stages


class _Ahead(local):
    """Results that this thread's pass has ready, see `chained_decoder.DecoderPass`; None for none."""

    now: Any = None


AHEAD = _Ahead()


class Fused(Changed):
    """Base of the mixins."""

    _calls: _Calls

    def _is_fit(self) -> bool:
        """Return True if fewer calls give what the parts do; they may have been replaced, edited, or have got hooks."""
        if self._calls.survey is not None and not self._calls.survey.holds():
            self._calls = _Calls()  # not those that others share
        if self._calls.survey is None and can_be_fused(self):
            self._calls.survey = Survey(self)
        return self._calls.survey is not None and self._calls.survey.is_free()


class GatedBlock(Fused):
    """Mixin for the class of a block with the layers `gate_proj`, `up_proj`, `down_proj` and `act_fn`."""

    gate_proj: Any
    down_proj: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the block."""
        rows = few_rows(x)
        if not rows or not self._is_fit():
            own: torch.Tensor = self.original.forward(self, x)
            return own
        layers = layers_of(self, GATED)
        x = _checked(layers, x)
        out = x.new_empty(*x.shape[:-1], layers[2].out_features)
        _run(self._calls.of(add_block, rows, given=(self, At(_X), At(_OUT), _MORE)), x, out, [], [], layers)
        return out


class FusedProjections(Fused):
    """Mixin for the class of an attention layer with `q_proj`, `k_proj` and `v_proj`, and maybe norms behind them."""

    o_proj: Any

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Compute attention; arguments are those of transformers' attention layers."""
        unusual = args or not FORMER_NAMES.isdisjoint(kwargs)
        if unusual or not fits(self, hidden_states, position_embeddings) or not self._is_fit():
            return self.original.forward(self, hidden_states, position_embeddings, attention_mask, *args, **kwargs)
        states = _projected(self._calls, self, hidden_states, position_embeddings, None)
        rest = {name: each for name, each in kwargs.items() if name != CACHE}
        out = _attended(self, states, attention_mask, kwargs.get(CACHE), rest)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


def fits(attention: Any, x: torch.Tensor, positions: Any) -> bool:
    """Return True if one call may give the projections of these rows."""
    if not few_rows(x) or attention.training or attention.config._attn_implementation != INVARIANT_ATTENTION:
        return False
    same = getattr(attention._modules["q_proj"], "dtype", None) == x.dtype  # autocast might cast them
    return same and _turns(positions, x, attention.head_dim)


def _projected(calls: _Calls, attention: Any, x: torch.Tensor, positions: Any, norm: Any) -> list[torch.Tensor]:
    """Return turned queries and keys, and values, `[B, S, heads, D]`, of rows `[B, S, in]`; the norm may be None."""
    (batch, step, _), layers, (cos, sin) = x.shape, projections_of(attention), positions
    x, rows, size, turns = _checked(layers, x), batch * step, attention.head_dim, cos.shape[0] * step
    states = [x.new_empty(batch, step, each.out_features // size, size) for each in layers]
    more = [cos.data_ptr(), sin.data_ptr(), *(each.data_ptr() for each in states)]
    prepared = calls.of(_add_projections, rows, turns, given=(attention, norm))
    _run(prepared, x, x, more, [norm, *head_norms_of(attention)], layers)
    return states


def _add_projections(stages: Stages, rows: int, turns: int, attention: Any, norm: Any) -> None:
    cos, sin, *states = (At(_MORE + each) for each in range(5))
    add_projections(stages, rows, turns, attention, norm, At(_X), (cos, sin), states, _MORE + 5)


def _attended(
    attention: Any, states: Sequence[torch.Tensor], mask: Any, cache: Any, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return the results of attention, `[B, S, heads, D]`, after the cache was given keys and values."""
    query, key, value = (each.transpose(1, 2) for each in states)
    if cache is not None:
        key, value = cache.update(key, value, attention.layer_idx)
    softcap = getattr(attention, "attn_logit_softcapping", None)
    kwargs = {"scaling": attention.scaling, "softcap": softcap, **kwargs}
    return invariant_attention(attention, query, key, value, mask, **kwargs)[0]


class FusedLayer(Fused):
    """Mixin for the class of a decoder layer of projections and a gated block, with a norm before either."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer; arguments are those of transformers' decoder layers."""
        attention: Any = self._modules["self_attn"]
        x, positions = hidden_states, kwargs.get("position_embeddings")
        if AHEAD.now is not None and (ready := AHEAD.now.output(self, x, kwargs)) is not None and not args:
            return ready
        unusual = args or not FORMER_NAMES.isdisjoint(kwargs)
        if unusual or not fits(attention, x, positions) or not self._is_fit():
            return self.original.forward(self, x, *args, **kwargs)
        begin, *norms = norms_of(self)
        mask, cache = kwargs.get("attention_mask"), kwargs.get(CACHE)
        rest = {name: each for name, each in kwargs.items() if name not in ARGUMENTS}
        states = _projected(self._calls, attention, x, positions, begin)
        found = _attended(attention, states, mask, cache, rest)
        rows, layers = x.numel() // x.shape[-1], layers_behind(self)
        for each in layers:
            each.follow_parameters()
        x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device="cpu")
        _run(self._calls.of(_add_layer, rows, given=(self,)), x, out, [found.data_ptr()], norms, layers)
        return out


def _add_layer(stages: Stages, rows: int, layer: Any) -> None:
    add_layer(stages, rows, layer, At(_X), At(_MORE), _MORE + 1, At(_OUT))


def _run(
    stages: Stages, x: torch.Tensor, out: torch.Tensor, more: list[int], norms: Iterable[Any], layers: Iterable[Any]
) -> None:
    """Run the stages of a call; the addresses of its norms' and layers' weights come last."""
    memory = torch.empty(stages.size, dtype=torch.int8, device="cpu")
    of_norms = [0 if norm is None else norm.weight.data_ptr() for norm in norms]
    addresses = [memory.data_ptr(), x.data_ptr(), out.data_ptr(), *more, *of_norms]
    for each in layers:
        addresses += each._panel_weight.addresses(each._parameters["bias"])
    stages.run(addresses)


def _checked(layers: Any, x: torch.Tensor) -> torch.Tensor:
    """Return contiguous rows, once layers that are not called are known to take them; all are of one kind."""
    x = layers[0].checked(x)
    for each in layers[1:]:
        each.follow_parameters()
    return x.contiguous()


def few_rows(x: Any) -> int:
    """Return the number of rows of `[..., in]` that one call takes; 0 for none, too many, or gradients."""
    rows = x.numel() // x.shape[-1] if is_plain(x) and x.numel() and not torch.is_grad_enabled() else 0
    return rows if rows <= PREPARED_ROWS else 0


# What is recognised


@torch.no_grad()
def fuse(model: nn.Module) -> None:
    """Fuse what is recognised in a model, in place; only layers whose weights are in panels are."""
    shared = dict[Any, Any]()
    for module in reversed(list(model.modules())):  # a layer after its parts
        names = set(module._modules)
        if names == {*GATED, "act_fn"} and not module._parameters and _is_gated(module):
            _change(module, GatedBlock)
        elif {*PROJECTED, "o_proj"} <= names and _takes_arguments(module) and _is_projected(module):
            _change(module, FusedProjections)
        elif names in _LAYERS and _takes_arguments(module) and _is_layer(module):
            _change(module, FusedLayer)
        if isinstance(module, Fused):
            module._calls.known = shared.setdefault(_shape_of(module), module._calls.known)


def _shape_of(module: Any) -> Any:
    """Return what the stages of a module are made of but for the number of rows: those of two rows."""
    stages = Stages()
    if isinstance(module, GatedBlock):
        add_block(stages, 2, module, At(_X), At(_OUT), _MORE)
    else:
        attention = getattr(module, "self_attn", module)
        before = norms_of(module)[0] if isinstance(module, FusedLayer) else None
        _add_projections(stages, 2, 2, attention, before)
    if isinstance(module, FusedLayer):
        _add_layer(stages, 2, module)
    return type(module), stages.described


def can_be_fused(module: Fused) -> bool:
    """Return True if stages give what a module with a mixin computes."""
    if isinstance(module, FusedLayer):
        return _is_layer(module)
    return _is_gated(module) if isinstance(module, GatedBlock) else _is_projected(module)


def _fixed(norm: Any) -> Any:
    """Return what stages have of a norm, besides the address of its weight."""
    weight: Any = norm._parameters["weight"]
    return weight.dtype, weight.shape, weight.is_contiguous(), weight.is_cpu, epsilon_of(norm)


def _are_in_panels(layers: Any) -> bool:
    """Return True if layers are packed, and have panels of one kind."""
    first = layers[0]
    if type(first) not in _KINDS or first.dtype not in _DTYPES:
        return False
    if any(type(each) is not type(first) or each.dtype != first.dtype for each in layers):
        return False
    return all(each._panel_weight is not None and each.panel != TILE_PANEL for each in layers)


def _is_gated(block: Any) -> bool:
    """Return True if one call gives what the layers of a block do, as long as they are free of hooks."""
    layers, activation = layers_of(block, GATED), block._modules["act_fn"]
    if not _are_in_panels(layers) or logistic_of(activation) is None:
        return False
    gate, up, down = layers
    same: bool = gate.in_features == up.in_features and gate.out_features == up.out_features == down.in_features
    return same and up.out_features >= WIDEST


def _is_projected(attention: Any) -> bool:
    """Return True if one call gives what the projections, and the norms behind them, of an attention layer do."""
    layers, size = projections_of(attention), getattr(attention, "head_dim", 0)
    if not _are_in_panels(layers) or not size or size % 2:
        return False
    if any(each.out_features % size or each.in_features != layers[0].in_features for each in layers):
        return False
    return _are_fusing(head_norms_of(attention), layers[0].dtype, size)


def _are_fusing(norms: Any, dtype: torch.dtype, columns: int) -> bool:
    return all(norm is None or (isinstance(norm, InvariantNorm) and norm.fuses(dtype, columns)) for norm in norms)


def _is_layer(layer: Any) -> bool:
    """Return True if two calls give what the parts of a decoder layer do, but for attention itself."""
    attention, block = layers_of(layer, ("self_attn", "mlp"))
    if not (isinstance(attention, FusedProjections) and isinstance(block, GatedBlock)):
        return False
    if not (_is_projected(attention) and _is_gated(block) and _are_in_panels(layers_behind(layer))):
        return False
    first, last = layers_of(attention, ("q_proj", "o_proj"))
    width, dtype = first.in_features, first.dtype
    if not width == last.out_features == block.gate_proj.in_features == block.down_proj.out_features:
        return False
    return _are_fusing(norms_of(layer), dtype, width)


def _takes_arguments(module: nn.Module) -> bool:
    """Return True if a forward has the arguments of transformers' layers, and needs no other."""
    parameters = inspect.signature(module.forward).parameters.values()
    needed = {each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD}
    return needed <= set(ARGUMENTS) <= {each.name for each in parameters}


def _turns(positions: Any, x: torch.Tensor, size: int) -> bool:
    """Return True if cosines and sines are of whole heads, in the dtype of the rows `[B, S, in]`."""
    if x.dim() != 3 or not isinstance(positions, tuple) or len(positions) != 2:
        return False
    (batch, step, _), (cos, sin) = x.shape, positions
    if not (is_plain(cos) and is_plain(sin) and cos.dtype == sin.dtype == x.dtype and cos.shape == sin.shape):
        return False
    return cos.shape in ((1, step, size), (batch, step, size)) and cos.is_contiguous() and sin.is_contiguous()


# Trials


def _change(module: Any, mixed_in: type[Fused]) -> None:
    """Mix a class into a module's class if a trial finds the same bits."""
    if not Survey(module).is_free():
        return
    change(module, mixed_in)
    module._calls = _Calls()
    if not _is_same(module):
        module.__class__ = module.original


def _is_same(module: Any) -> bool:
    """Return True if a module's own forward has the same results, and gives its cache the same, bit for bit."""
    first: Any = next(each for each in module.modules() if isinstance(each, PackedLinear))
    given = dict[str, Any]()
    if not isinstance(module, GatedBlock):
        size = getattr(module, "self_attn", module).head_dim
        turns = seeded(2, 1, _TRIAL[1], size, dtype=first.dtype).unbind()
        given = {"position_embeddings": turns, "attention_mask": None}
    x, seen, kinds = seeded(*_TRIAL, first.in_features, dtype=first.dtype), list[Any](), set[Any]()
    for forward in (module.original.forward.__get__(module), module):
        cache: Any = DynamicCache()
        try:
            found = forward(x, **given, **({CACHE: cache} if given else {}))
        except RuntimeError:
            return False  # it turns a part of each head, and takes cosines and sines of that size alone
        cached = [state for each in cache.layers if each.is_initialized for state in (each.keys, each.values)]
        seen.append([found[0] if isinstance(found, tuple) else found, *cached])
        kinds.add((type(found), len(cache.layers), len(cached)))
    return len(kinds) == 1 and all(map(torch.equal, *seen))


def seeded(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return random numbers, the same in each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(dtype)
