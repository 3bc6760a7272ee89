"""Gated feed-forward blocks, `down(activation(gate(x)) * up(x))`, in one call.

Of few rows, a block's five operations take hardly longer than their calls from Python. One team of threads runs them
one after the other here, with the same bits: products in panels and the activation are those of the block's own layers,
and rounding to the dtype comes after the same operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from lade.backends.cpu.invariant.activations import Logistic, logistic_of
from lade.backends.cpu.kernels import WIDEST, dtype_code, is_plain, kernel
from lade.backends.cpu.packing.int4 import Int4Linear
from lade.backends.cpu.packing.int8 import Int8Linear
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.cpu.packing.panel_weight import PREPARED_ROWS, Layout, PanelWeight, put_rows
from lade.backends.cpu.packing.panels import TILE_PANEL
from lade.backends.cpu.worker_threads import Stages, float_bits
from lade.model.in_place_subclassing import Changed, change

_NAMES = ("gate_proj", "up_proj", "down_proj", "act_fn")
_KINDS = (PackedLinear, Int8Linear, Int4Linear)
_DTYPES = (torch.float32, torch.bfloat16)
_MANY = 2**14  # least numbers of the activation per thread


class _Parts(NamedTuple):
    """Layers of a block."""

    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear
    activation: Any


class _Call(NamedTuple):
    """Prepared pass of a number of rows: its stages, room for the rows of either product, and places of all fields."""

    weights: tuple[PanelWeight, PanelWeight, PanelWeight]
    stages: Stages
    layouts: tuple[Layout, Layout]
    places: tuple[int, int, int, int, int, int]


class _Prepared(dict[tuple[int, int], _Call]):
    """Prepared passes by rows and threads; copies start empty, as addresses of the weights are in them."""

    def __reduce__(self) -> Any:
        return _Prepared, ()


class GatedBlock(Changed):
    """Mixin for the class of a block with the layers `gate_proj`, `up_proj`, `down_proj` and `act_fn`."""

    _calls: _Prepared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the block; the original forward does where layers have hooks, or many rows or gradients are asked."""
        parts = _parts_of(self)
        rows = x.numel() // max(1, x.shape[-1]) if x.dim() else 0
        if parts is None or not 0 < rows <= PREPARED_ROWS or not is_plain(x):
            own: torch.Tensor = self.original.forward(self, x)
            return own
        x = parts.gate.checked(parts.up.checked(x)).contiguous()
        hidden = torch.empty(3, rows, parts.up.out_features, dtype=x.dtype)
        parts.down.checked(hidden[2])
        out = torch.empty(*x.shape[:-1], parts.down.out_features, dtype=x.dtype)
        logistic = logistic_of(parts.activation)
        assert logistic is not None
        _run(_prepared(self._calls, parts, logistic, rows), parts, x, hidden, out)
        return out


def fuse_gated(model: nn.Module) -> None:
    """Make one call of each gated block of a model whose layers are in panels, in place.

    A block is recognised by the names of its layers, and by a trial: its own forward gives the same bits.
    """
    for layer in model.modules():
        if set(layer._modules) == set(_NAMES) and not layer._parameters and _parts_of(layer) is not None:
            change(layer, GatedBlock)
            layer.__dict__["_calls"] = _Prepared()
            if not _is_same(layer):
                layer.__class__ = layer.original  # type: ignore[assignment]


@torch.no_grad()
def _is_same(block: Any) -> bool:
    """Return True if a block's own forward gives the same bits as the one call."""
    gate = block._modules["gate_proj"]
    x = torch.randn(3, gate.in_features, generator=torch.Generator().manual_seed(0)).to(gate.dtype)
    own = block.original.forward(block, x)
    return isinstance(own, torch.Tensor) and torch.equal(own, block(x))


def _parts_of(block: nn.Module) -> _Parts | None:
    """Return the layers of a block if one call gives what theirs do: in panels of one kind, without hooks."""
    modules: Any = block._modules
    gate, up, down, activation = (modules[name] for name in _NAMES)
    layers = gate, up, down
    for layer in (*layers, activation):
        if layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__:
            return None
    if type(gate) not in _KINDS or not type(gate) is type(up) is type(down):
        return None
    if any(layer._panel_weight is None or layer.panel == TILE_PANEL for layer in layers) or gate.dtype not in _DTYPES:
        return None
    if not gate.dtype == up.dtype == down.dtype or logistic_of(activation) is None:
        return None
    if not (gate.in_features == up.in_features and gate.out_features == up.out_features == down.in_features):
        return None
    return _Parts(gate, up, down, activation) if up.out_features >= WIDEST else None


def _prepared(calls: _Prepared, parts: _Parts, logistic: Logistic, rows: int) -> _Call:
    key = rows, torch.get_num_threads()
    weights: Any = tuple(layer._panel_weight for layer in parts[:3])
    call = calls.get(key)
    if call is not None and all(map(_is, call.weights, weights)):
        return call
    (gate, up, down), stages = weights, Stages()
    first, x_place = gate.add_rows(stages, rows)
    gate_place, up_place = gate.add_product(stages, rows), up.add_product(stages, rows)
    numbers, bits = rows * up.outputs, (float_bits(-logistic.slope), float_bits(-logistic.cubic))
    fields = 0, 0, 0, 0, *bits, numbers  # a LogisticProduct, see cpu_exponentials.h
    parts_of_it = max(1, min(key[1], numbers // _MANY))
    act_place = stages.add(kernel("logistic_product"), parts_of_it, fields)
    second, hidden_place = down.add_rows(stages, rows)
    places = x_place, gate_place, up_place, act_place, hidden_place, down.add_product(stages, rows)
    calls[key] = call = _Call(weights, stages, (first, second), places)
    return call


def _is(one: object, other: object) -> bool:
    return one is other


def _run(call: _Call, parts: _Parts, x: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor) -> None:
    """Run a prepared pass; `hidden` `[3, rows, in]` is for what gate and up give, and for their product."""
    gate, up, down = call.weights
    x_place, gate_place, up_place, act_place, hidden_place, down_place = call.places
    first, second = call.layouts
    room, kind, fields = (
        torch.empty(sum(first) + sum(second), dtype=torch.int8),
        dtype_code(x.dtype),
        call.stages.fields[:],
    )
    at, size = hidden.data_ptr(), hidden.stride(0) * hidden.itemsize
    given = first.addresses(room.data_ptr(), x.data_ptr())
    inner = second.addresses(room.data_ptr() + sum(first), at + 2 * size)
    put_rows(fields, x_place, x.data_ptr(), kind, given)
    gate.put_product(fields, gate_place, given, parts.gate.bias, at, kind)
    up.put_product(fields, up_place, given, parts.up.bias, at + size, kind)
    fields[act_place], fields[act_place + 1], fields[act_place + 2], fields[act_place + 3] = (
        *(at, at + size, at + 2 * size),
        kind,
    )
    put_rows(fields, hidden_place, at + 2 * size, kind, inner)
    down.put_product(fields, down_place, inner, parts.down.bias, out.data_ptr(), kind)
    call.stages.run(fields, (call, parts, x, hidden, room, out))
