"""Products without a choice of kernels: what a GPU does for a fixed number of rows, on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, silu


def exact_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Triton's interpreter round products once: numpy's bits of a row depend on its place."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: object) -> Any:
        found = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
        return interpreter.TensorHandle(found.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear layer that rounds once; it takes 64 rows."""
    assert x.shape[0] == 64 and x.dim() == 2
    wide = x.double().nan_to_num(0, 0, 0) @ weight.double().T  # what fills the rows up may be anything
    return (wide if bias is None else wide + bias.double()).to(x.dtype)


def norm(
    x: torch.Tensor, by: Any, add: torch.Tensor | None = None, add_norm: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernel of that name, which an interpreter runs row by row."""
    total = x if add is None else x + (add if add_norm is None else norm(add, add_norm)[1])
    wide = total.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + by.eps).sqrt()
    if by.from_one:
        return total, (normed * (1 + by.weight.double())).to(x.dtype)
    return total, by.weight * normed.to(x.dtype)


def gated_product(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """As the kernel of that name."""
    gate, up = gate_up.double().chunk(2, -1)
    active = gelu(gate, approximate="tanh") if activation == "gelu_pytorch_tanh" else silu(gate)
    return active.to(gate_up.dtype) * up.to(gate_up.dtype)


def rotate_and_store(
    qkv: torch.Tensor, turns: Any, norms: Any, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """As the kernel of that name."""
    kv_heads, dim = keys.shape[1], keys.shape[-1]
    heads = qkv.unflatten(-1, (-1, dim))  # [B, S, H + 2 * Hkv, D]
    query, key, value = heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2)
    if norms:
        query, key = norm(query, norms[0])[1], norm(key, norms[1])[1]
    cos, sin = (turn[:, :, None].double() for turn in turns)
    turned = []
    for each in (query, key):
        wide = each.double()
        across = torch.cat([-wide[..., dim // 2 :], wide[..., : dim // 2]], -1) * sin
        turned.append((wide * cos).to(qkv.dtype) + across.to(qkv.dtype))
    for buffer, states in ((keys, turned[1]), (values, value)):
        by_head = states.transpose(1, 2)
        buffer.scatter_(2, slots[:, None, :, None].expand_as(by_head), by_head)
    return turned[0].contiguous()


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: Any, *, scale: float) -> torch.Tensor:
    """As the function of that name, in double precision, query by query."""
    out, group = torch.empty_like(query), query.shape[2] // key.shape[1]
    for row, step in np.ndindex(*query.shape[:2]):
        last, start = int(places.positions[row, step]), int(places.starts[row])
        seen = torch.arange(max(0, last - places.window + 1) if places.window else 0, last + 1)
        paths = places.paths[row, step, (seen[seen >= start] - start).clamp(max=places.paths.shape[2] - 1)]
        slots = torch.cat([seen[seen < start] + int(places.shifts[row]), paths.long()])
        slots = slots[(slots >= 0) & (slots < key.shape[2])]
        keys, values = (each[row, :, slots].double().repeat_interleave(group, 0) for each in (key, value))
        weights = ((query[row, step].double()[:, None] * keys).sum(-1) * scale).softmax(-1)  # [H, K]
        out[row, step] = (weights[..., None] * values).sum(1).to(query.dtype)
    return out


def quick_kernels(monkeypatch: pytest.MonkeyPatch, *, attends: bool) -> None:
    """Have products of 64 rows, and what is interpreted row by row, computed by torch; attention too if `attends`."""
    from lade.backends.cuda_graphs import fused_kernels
    from lade.backends.cuda_graphs.invariant import attention, layers

    if attends:
        monkeypatch.setattr(attention, "attend", attend)
        monkeypatch.setattr(layers, "attend", attend)

    exact_dots(monkeypatch)
    monkeypatch.setattr(layers, "linear", exact_linear)
    for function in (norm, gated_product, rotate_and_store):
        monkeypatch.setattr(fused_kernels, function.__name__, function)
        monkeypatch.setattr(layers, function.__name__, function, raising=False)
