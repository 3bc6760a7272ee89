"""A boolean mask that knows the position of every key: what `lade_invariant` has to know to sum in one order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from transformers.masking_utils import sdpa_mask

from lade.model.kernels.kinds import is_plain, refuse


class PlacedMask(torch.Tensor):
    """`[B, 1, S, K]` bool, true where a query may see a key. Any operation of torch makes an ordinary tensor of it.

    Attributes:
        positions: `[B, K]` int64, of the keys; those that no query sees have an arbitrary one.
    """

    positions: torch.Tensor

    @classmethod
    def of(cls, allowed: torch.Tensor, positions: torch.Tensor) -> PlacedMask:
        """A mask of these entries."""
        mask = allowed.as_subclass(cls)
        mask.positions = positions
        return mask

    @cached_property
    def allowed(self) -> torch.Tensor:
        """`[B, S, K]`, as an ordinary tensor whose last dimension lies in one piece."""
        allowed = self.as_subclass(torch.Tensor)[:, 0]
        return allowed if allowed.stride(-1) == 1 else allowed.contiguous()

    @cached_property
    def spans(self) -> torch.Tensor:
        """`[B, S, 2]` int64: the first key that a query sees, and the one behind the last."""
        seen = self.allowed.to(torch.uint8)
        return torch.stack([seen.argmax(-1), seen.shape[-1] - seen.flip(-1).argmax(-1)], -1)

    @cached_property
    def _places(self) -> tuple[tuple[int, ...], tuple[int, int, int, int]]:
        if not (is_plain(self.allowed) and self.allowed.dtype == torch.bool and self.shape[1] == 1):
            refuse("attention", "masks [B, 1, S, K] of bool on the CPU", mask=self)
        row, step, _ = self.allowed.stride()
        return tuple(self.allowed.shape), (self.allowed.data_ptr(), row, step, self.spans.data_ptr())

    def places(self, rows: int, step: int, keys: int) -> tuple[int, int, int, int]:
        """Where it lies in memory: its address and strides, and the address of its spans; the same in all layers.

        Raises:
            ValueError: it is not for as many rows, queries and keys, or no mask of bool on the CPU.
        """
        shape, places = self._places
        if shape != (rows, step, keys):
            raise ValueError(f"a mask {list(shape)} was given for [rows, queries, keys] of {[rows, step, keys]}")
        return places

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Some of the queries are a mask as well, since some models compute the last token alone in some layers."""
        found: torch.Tensor = super().__getitem__(index)
        whole = found.ndim == 4 and found.shape[::3] == self.shape[::3]  # all rows, all keys
        return PlacedMask.of(found, self.positions) if whole else found

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def placed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> PlacedMask:
    """The mask of an ordinary pass, as transformers' interface for masks wants it.

    Positions count the tokens of a row: padding on the left has none.
    """
    make: Callable[..., Any] = sdpa_mask
    allowed: torch.Tensor = make(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        device=device,
        allow_is_causal_skip=False,
        **kwargs,
    )
    slots = torch.arange(kv_length, device=device) + kv_offset
    positions = slots.expand(batch_size, -1)  # [B, K]
    if attention_mask is not None:
        places = attention_mask.to(device).cumsum(-1) - 1  # [B, all tokens so far]
        within = slots.clamp(max=places.shape[1] - 1)
        positions = places[:, within].expand(batch_size, -1)
    return PlacedMask.of(allowed.expand(batch_size, -1, -1, -1), positions)
