"""The stages of a decoder layer: what its parts compute, one kernel after the other; see `fused` and `chained_decoder`.

    q, k, v = turned(norm(q(x))), turned(norm(k(x))), v(x)     projections; the norms are optional
    down(activation(gate(x)) * up(x))                          a gated block
    h = x + norm(o(attention(projections(norm(x)))))           a decoder layer; the outer norms are optional
    h + norm(block(norm(h)))

What is rounded to the model's dtype is rounded after the same operations as in the modules themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lade.backends.cpu.invariant.functions import epsilon_of, logistic_of
from lade.backends.cpu.kernels import At, Stages, dtype_code, float_bits, kernel, parts_of

GATED, PROJECTED = ("gate_proj", "up_proj", "down_proj"), ("q_proj", "k_proj", "v_proj")
HEAD_NORMS = ("q_norm", "k_norm")
LAYER_NORMS: tuple[tuple[str | None, ...], ...] = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
"""Names of a layer's norms before attention and behind its output, before the block and behind that."""


def layers_of(module: Any, names: Iterable[str]) -> Any:
    """Return the children of these names, without `nn.Module.__getattr__`."""
    modules = module._modules
    return [modules[name] for name in names]


def projections_of(attention: Any) -> Any:
    """Return the layers of queries, keys and values."""
    return layers_of(attention, PROJECTED)


def head_norms_of(attention: Any) -> Any:
    """Return the norms of queries and keys; None for one that attention lacks."""
    modules = attention._modules
    return [modules.get(name) for name in HEAD_NORMS]


def norms_of(layer: Any) -> Any:
    """Return the four norms of a decoder layer, see `LAYER_NORMS`; None for one that it lacks."""
    modules = layer._modules
    names = next(names for names in LAYER_NORMS if len([*filter(None, names)]) == len(modules) - 2)
    return [None if name is None else modules[name] for name in names]


def layers_behind(layer: Any) -> list[Any]:
    """Return the linear layers of a decoder layer that come after attention."""
    return [layer._modules["self_attn"]._modules["o_proj"], *layers_of(layer._modules["mlp"], GATED)]


def add_projections(
    stages: Stages,
    rows: int,  # all tokens of all texts
    turns: int,  # rows of cosines and sines
    attention: Any,
    norm: Any,  # before the projections, or None
    x: At,  # [rows, in]
    positions: Sequence[At],  # cosines and sines, [turns, D]
    states: Sequence[At],  # queries, keys and values to be, [rows, heads, D]
    own: int,  # index of the first address: of three norms' weights, 0 for none, and of each layer's weight and bias
) -> None:
    """Add the stages of the projections of attention, and of what turns them."""
    layers, size = projections_of(attention), attention.head_dim
    kind = dtype_code(layers[0].dtype)
    if norm is not None:
        normed = stages.take(rows * layers[0].in_features * layers[0].dtype.itemsize)
        _add_norm(stages, rows, norm, x, own, normed)
        x = normed
    blocks = layers[0]._panel_weight.add_rows(stages, rows, x, kind)
    for number, (layer, found) in enumerate(zip(layers, states, strict=True)):
        layer._panel_weight.add_product(
            stages, rows, blocks, own + 3 + 2 * number, found, kind, kind, joined=number > 0
        )
    for number, head_norm in enumerate(head_norms_of(attention)):
        layer, found = layers[number], states[number]
        heads = layer.out_features // size
        if head_norm is not None:
            _add_norm(stages, rows * heads, head_norm, found, own + 1 + number, found)
        turn = found, *positions, kind, rows, turns, heads, size  # a Rotation, see cpu_elementwise.h
        stages.add(kernel("rotate"), parts_of(rows * layer.out_features), turn)


def _add_norm(stages: Stages, rows: int, norm: Any, x: At, own: int, out: At) -> None:
    kind, columns = dtype_code(norm.weight.dtype), norm.weight.numel()
    fields = x, At(own), out, kind, *norm.fields(columns, rows, epsilon_of(norm))
    stages.add(kernel("normalise"), parts_of(rows * columns), fields)


def add_block(stages: Stages, rows: int, block: Any, x: At, out: At, own: int) -> None:
    """Add the stages of a gated block; `own` is the index of the first address of its weights."""
    (gate, up, down), logistic = layers_of(block, GATED), logistic_of(block.act_fn)
    assert logistic is not None
    numbers, kind = rows * up.out_features, dtype_code(gate.dtype)
    of_gate, of_up, product = (stages.take(numbers * gate.dtype.itemsize) for _ in range(3))
    blocks = gate._panel_weight.add_rows(stages, rows, x, kind)
    gate._panel_weight.add_product(stages, rows, blocks, own, of_gate, kind, kind)
    up._panel_weight.add_product(stages, rows, blocks, own + 2, of_up, kind, kind, joined=True)
    slopes = float_bits(-logistic.slope), float_bits(-logistic.cubic)
    stages.add(kernel("logistic_product"), parts_of(numbers), (of_gate, of_up, product, kind, *slopes, numbers))
    _add_linear(stages, rows, down, product, out, own + 4)


def _add_linear(stages: Stages, rows: int, layer: Any, x: At, out: At, own: int) -> None:
    kind = dtype_code(layer.dtype)
    blocks = layer._panel_weight.add_rows(stages, rows, x, kind)
    layer._panel_weight.add_product(stages, rows, blocks, own, out, kind, kind)


def add_layer(
    stages: Stages,
    rows: int,  # all tokens of all texts
    layer: Any,  # of one of the kinds in `LAYER_NORMS`
    x: At,  # its input, [rows, in]
    attended: At,  # the result of attention, [rows, H * D]
    own: int,  # index of the first address: of three norms' weights, 0 for none, and of each layer's weight and bias
    out: At,  # its output to be, [rows, in]
) -> None:
    """Add the stages of a decoder layer behind attention."""
    output, (_, behind_attention, before_block, behind_block) = layer.self_attn.o_proj, norms_of(layer)
    kind, numbers = dtype_code(output.dtype), rows * output.out_features
    of_attention, hidden, normed, of_block = (stages.take(numbers * output.dtype.itemsize) for _ in range(4))
    _add_linear(stages, rows, output, attended, of_attention, own + 3)
    if behind_attention is not None:
        _add_norm(stages, rows, behind_attention, of_attention, own, of_attention)
    stages.add(kernel("add"), parts_of(numbers), (x, of_attention, hidden, kind, numbers))
    _add_norm(stages, rows, before_block, hidden, own + 1, normed)
    add_block(stages, rows, layer.mlp, normed, of_block, own + 5)
    if behind_block is not None:
        _add_norm(stages, rows, behind_block, of_block, own + 2, of_block)
    stages.add(kernel("add"), parts_of(numbers), (hidden, of_block, out, kind, numbers))
