"""What weights are made of: one that is quantised may be a tensor that wraps others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def parts_of(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a weight wraps, such as codes and scales, however deep; the weight itself if it wraps none."""
    flatten: Any = getattr(weight, "__tensor_flatten__", None)  # PyTorch's protocol for tensors that wrap others
    if flatten is None:
        yield weight
        return
    names, _ = flatten()
    parts = [getattr(weight, name) for name in names]
    for part in parts:
        if isinstance(part, torch.Tensor):  # a split weight names its group of processes, too
            yield from parts_of(part)


def bytes_by_kind(weights: Iterable[torch.Tensor]) -> dict[str, int]:
    """Bytes in memory by the class of the weight and the dtype it passes for, such as "Parameter float32"."""
    found: dict[tuple[type, torch.dtype], int] = {}
    for weight in weights:
        kind, wraps = (type(weight), weight.dtype), type(weight) is not torch.nn.Parameter
        nbytes = sum(part.nbytes for part in parts_of(weight)) if wraps else weight.nbytes
        found[kind] = found.get(kind, 0) + nbytes
    named: dict[str, int] = {}
    for (kind_of, dtype), nbytes in found.items():  # classes of several libraries may have one name
        name = f"{kind_of.__name__} {dtype}".replace("torch.", "")
        named[name] = named.get(name, 0) + nbytes
    return named
