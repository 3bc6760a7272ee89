"""The attention implementation `lade_invariant`: one summation order per query, whatever else is in the batch.

PyTorch's attention rounds differently for one query and for sixteen, and for 64 keys and for 65. Here each query runs
the same instructions, key by key, whatever its neighbours (`lade/native/cpu_attention.h`). So a node of a tree gets
bit for bit what plain decoding gives the same text: the keys that it sees are in the order of their positions, and
masked keys have weight zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from lade.backends.cpu.kernels import (
    CALLED,
    DTYPE_CODES,
    WIDEST,
    address_of,
    dtype_code,
    float_bits,
    is_plain,
    kernel,
    refuse,
    run_on_team,
)
from lade.model.inputs import INVARIANT_ATTENTION as NAME

_QUAD, _CHUNK = 4, 64  # queries that pass through the keys together, and keys converted to float32 at a time
_ROWS = 64  # queries that share the converted keys and values
_SCORES = 2**18  # most scores per block, a megabyte, if that leaves at least a quad
_MANY = 2**15  # least multiplications per thread of a stage


class PlacedMask(torch.Tensor):
    """Mask `[B, 1, S, K]` bool, true where a query may see a key; torch operations return ordinary tensors.

    Attributes:
        positions: `[B, K]` int64, positions of the keys; arbitrary for keys that no query sees.
    """

    positions: torch.Tensor

    @classmethod
    def of(cls, allowed: torch.Tensor, positions: torch.Tensor) -> PlacedMask:
        """Return a mask with these entries and key positions."""
        mask = allowed.as_subclass(cls)
        mask.positions = positions
        return mask

    @cached_property
    def allowed(self) -> torch.Tensor:
        """`[B, S, K]` bool as an ordinary tensor, contiguous along the keys."""
        return _with_rows(self.as_subclass(torch.Tensor)[:, 0])

    @cached_property
    def spans(self) -> torch.Tensor:
        """`[B, S, 2]` int64: the first key that a query sees, and one past the last."""
        seen = self.allowed.to(torch.uint8)
        return torch.stack([seen.argmax(-1), seen.shape[-1] - seen.flip(-1).argmax(-1)], -1)

    @cached_property
    def _addresses(self) -> tuple[tuple[int, ...], tuple[int, int, int, int]]:
        if not (is_plain(self.allowed) and self.allowed.dtype == torch.bool and self.shape[1] == 1):
            refuse("attention", "masks [B, 1, S, K] of bool on the CPU", mask=self)
        row, step, _ = self.allowed.stride()
        return tuple(self.allowed.shape), (self.allowed.data_ptr(), row, step, self.spans.data_ptr())

    def addresses(self, rows: int, step: int, keys: int) -> tuple[int, int, int, int]:
        """Return address and strides of the mask, and the address of its spans; computed once for all layers.

        Raises `ValueError` if it has other numbers of rows, queries or keys, or is not a bool tensor on the CPU.
        """
        shape, addresses = self._addresses
        if shape != (rows, step, keys):
            raise ValueError(f"the mask is {list(shape)}, but [rows, queries, keys] are {[rows, step, keys]}")
        return addresses

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Keep slices along the queries as masks, since some models compute only the last token in some layers."""
        found: torch.Tensor = super().__getitem__(index)
        whole = found.ndim == 4 and found.shape[::3] == self.shape[::3]  # all rows and all keys
        return PlacedMask.of(found, self.positions) if whole else found

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def placed_mask(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,  # the others of `sdpa_mask`
) -> PlacedMask:
    """Return the mask of an ordinary pass, as transformers' mask interface asks for it.

    Positions count the tokens of a row; left padding has none.
    """
    make: Callable[..., Any] = sdpa_mask
    allowed: torch.Tensor = make(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        device=device,
        **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    slots = torch.arange(kv_length, device=device, dtype=torch.int64) + kv_offset
    positions = slots.expand(batch_size, -1)  # [B, K]
    if attention_mask is not None:
        addresses = attention_mask.to(device).cumsum(-1) - 1  # [B, all tokens so far]
        within = slots.clamp(max=addresses.shape[1] - 1)
        positions = addresses[:, within].expand(batch_size, -1)
    return PlacedMask.of(allowed.expand(batch_size, -1, -1, -1), positions)


def invariant_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, H, S, D], float32, bfloat16 or float16, as keys and values; sums are in float32
    key: torch.Tensor,  # [B, Hkv, K, D]
    value: torch.Tensor,  # [B, Hkv, K, Dv]
    attention_mask: torch.Tensor | None,  # None: the queries are the last of the keys, or belong to an encoder
    dropout: float = 0.0,
    scaling: float | None = None,  # of scores; None for D ** -0.5
    softcap: float | None = None,  # scores s become softcap * tanh(s / softcap)
    s_aux: torch.Tensor | None = None,  # [H], attention sinks: score of a key without a value
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers' attention interface asks for it, for inference.

    Returns:
        `[B, S, H, Dv]` in the dtype of `query`, and None in place of attention weights.

    Raises:
        ValueError: a mask without key positions, a position bias, dropout, gradients, or states of another dtype,
            device or shape.
    """
    if dropout or kwargs.get("position_bias") is not None:
        raise ValueError(f'{NAME!r} supports neither dropout nor a position bias: use attn_implementation="eager"')
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise ValueError(f"{NAME!r} has no gradients: call the model under torch.no_grad()")
    if query.device.type != "cpu":
        raise ValueError(f"{NAME!r} was given states on {query.device}, but is for the CPU: call lade.variant(model)")
    if query.dtype not in DTYPE_CODES:
        raise ValueError(f"{NAME!r} was given {query.dtype}, but is for 16 and 32 bits: call lade.variant(model)")
    if attention_mask is None:
        given = kwargs.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if given is None else given)
        attention_mask = mask_of_all(len(query), query.shape[2], key.shape[2], causal=causal)
    if not isinstance(attention_mask, PlacedMask):
        raise ValueError(
            f"{NAME!r} was given a mask {list(attention_mask.shape)} without the positions of keys: "
            'give a two-dimensional mask, or use attn_implementation="sdpa"'
        )
    scale = max(query.shape[-1], 1) ** -0.5 if scaling is None else scaling
    return attention_of(query, key, value, attention_mask, scale, softcap, s_aux).to(query.dtype), None


def mask_of_all(rows: int, step: int, slots: int, *, causal: bool) -> PlacedMask:
    """Return the mask of the last `step` tokens of `slots`, which see all of them, or all up to themselves."""
    allowed = torch.ones(step, slots, dtype=torch.bool, device="cpu")
    allowed = allowed.tril(slots - step) if causal else allowed
    positions = torch.arange(slots, device="cpu", dtype=torch.int64).expand(rows, -1)
    return PlacedMask.of(allowed.expand(rows, 1, -1, -1), positions)


def attention_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: PlacedMask,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `invariant_attention`, `[B, S, H, Dv]`, in float32, or in bfloat16 if the queries are."""
    if not _fits(query, key, value, sinks):
        takes = "tensors on the CPU, [B, H, S, D], [B, Hkv, K, D], [B, Hkv, K, Dv] and [H]; neither D nor K is 0"
        refuse("attention", takes, query=query, key=key, value=value, sinks=sinks)
    rows, heads, step, size = query.shape
    _, kv_heads, keys, value_size = value.shape
    query, key, value = _with_rows(query), _with_rows(key), _with_rows(value)
    sinks = None if sinks is None else sinks.float().contiguous()
    dtype = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
    out = torch.empty(rows, step, heads, value_size, dtype=dtype, device="cpu")
    if not out.numel():
        return out
    group = heads // kv_heads
    split = AttentionSplit.of(rows, kv_heads, group, step, size, value_size, keys, called=2 * CALLED)
    scratch = split.scratch()
    fields = (  # an AttentionCall, see cpu_attention.h
        *(scratch.data_ptr(), split.room, float_bits(scale), float_bits(softcap or 0.0)),
        *_addresses(query),
        *_addresses(key),
        *_addresses(value),
        *mask.addresses(rows, step, keys),
        *(address_of(sinks), out.data_ptr(), dtype_code(out.dtype)),
        *(rows, kv_heads, group, step, size, value_size, split.block, split.blocks, split.slots),
    )
    run_on_team(kernel("attend"), fields, split.parts)
    return out


class AttentionSplit(NamedTuple):
    """How the work of an attention call is split."""

    block: int  # queries of one KV head that make a work item
    blocks: int  # work items of each row and KV head
    slots: int  # keys, padded to whole chunks
    parts: int  # parts that the work is shared out in
    room: int  # float32 numbers of scratch memory per part; an upper bound for every vector width

    @classmethod
    def of(
        cls, rows: int, kv_heads: int, group: int, step: int, size: int, value_size: int, keys: int, *, called: int = 1
    ) -> AttentionSplit:
        """Return the split for `rows * step` tokens with `kv_heads * group` heads, which see `keys` keys each.

        It is that of a stage; `CALLED` if a team has to be called for it.
        """
        slots, queries, many = -(-keys // _CHUNK) * _CHUNK, group * step, called * _MANY
        block = min(_ROWS, -(-queries // _QUAD) * _QUAD, max(_QUAD, _SCORES // slots // _QUAD * _QUAD))
        blocks, numbers = -(-queries // block), rows * kv_heads * queries * size
        parts = max(1, min(torch.get_num_threads(), rows * kv_heads * blocks, numbers * slots // many))
        wide, wide_values = (-(-each // WIDEST) * WIDEST for each in (size, value_size))
        room = _CHUNK * (max(wide, wide_values) + wide) + block * (size + slots + wide_values + 1)
        return cls(block, blocks, slots, parts, room)

    def scratch(self) -> torch.Tensor:
        """Return scratch memory for all parts."""
        return torch.empty(self.parts * self.room, dtype=torch.float32, device="cpu")


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None) -> bool:
    """Return True if shapes match and the kernel can read the tensors; dtypes are checked by `dtype_code`."""
    if not (is_plain(query) and is_plain(key) and is_plain(value) and query.dim() == key.dim() == value.dim() == 4):
        return False
    rows, heads, _, size = query.shape
    key_rows, kv_heads, keys, key_size = key.shape
    value_rows, value_heads, values, _ = value.shape
    alike = rows == key_rows == value_rows and kv_heads == value_heads and keys == values and size == key_size
    if not (alike and size and keys and kv_heads) or heads % kv_heads:
        return False
    return sinks is None or (is_plain(sinks) and sinks.shape == (heads,))


def _with_rows(states: torch.Tensor) -> torch.Tensor:
    """Return the same numbers, contiguous along the last dimension."""
    return states if states.stride(-1) == 1 else states.contiguous()


def _addresses(states: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Return address, strides in bytes and dtype code of `[B, Hkv, K, D]`."""
    item, (row, head, step, _) = states.itemsize, states.stride()
    return states.data_ptr(), row * item, head * item, step * item, dtype_code(states.dtype)


AttentionInterface.register(NAME, invariant_attention)
AttentionMaskInterface.register(NAME, placed_mask)
