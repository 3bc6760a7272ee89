"""The attention implementation `lade_invariant`: one summation order per query, whatever the batch.

Attention as PyTorch has it rounds otherwise for one query than for sixteen, and for 64 keys than for 65. Here each
query goes through the same instructions, one key after another, whatever is beside it (`kernels/attention.py`). So a
node of a tree gets bit for bit what plain decoding gives the same text: the keys that it sees lie in the cache in the
order of their positions, and the others have the weight zero. That a result must not depend on how the work is cut is
the idea of Thinking Machines' "Defeating nondeterminism in LLM inference" (2025).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from lade.backends.cpu.kernels.attention import CHUNK, Call, attend, scratch_size
from lade.backends.cpu.kernels.kinds import is_plain, kind_of, refuse
from lade.backends.cpu.kernels.vectors import QUAD
from lade.backends.cpu.worker_threads import bits, in_team
from lade.model.masks import INVARIANT_ATTENTION


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


_ROWS = 64  # queries that share what is converted of keys and values
_SCORES = 2**18  # of a block at the most, where that leaves a quad: a megabyte
_OUT = {torch.bfloat16: torch.bfloat16}
_MANY = 2**18  # multiplications that are worth a thread of their own


def attention_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: PlacedMask,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention, `[B, S, H, Dv]`: float32, or bfloat16 as the queries are.

    Args:
        query: `[B, H, S, D]`, of 16 or 32 bits, on the CPU like the others.
        key: `[B, Hkv, K, D]`, likewise.
        value: `[B, Hkv, K, Dv]`, likewise.
        mask: `[B, 1, S, K]`.
        scale: factor of the scores.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: `[H]`, the score of one more key of each head, which has no value.

    Raises:
        ValueError: any of these is of another shape, dtype or device.
    """
    if not _fits(query, key, value, sinks):
        takes = "tensors on the CPU, [B, H, S, D], [B, Hkv, K, D], [B, Hkv, K, Dv] and [H]; neither D nor K is 0"
        refuse("attention", takes, query=query, key=key, value=value, sinks=sinks)
    rows, heads, step, size = query.shape
    _, kv_heads, keys, value_size = value.shape
    query, key, value = _with_rows(query), _with_rows(key), _with_rows(value)
    sinks = None if sinks is None else sinks.float().contiguous()
    out = torch.empty(rows, step, heads, value_size, dtype=_OUT.get(query.dtype, torch.float32))
    if not out.numel():
        return out
    group = heads // kv_heads
    slots = -(-keys // CHUNK) * CHUNK
    block = min(_ROWS, -(-group * step // QUAD) * QUAD, max(QUAD, _SCORES // slots // QUAD * QUAD))
    call = Call(
        *_places(query),
        *_places(key),
        *_places(value),
        *mask.places(rows, step, keys),
        0 if sinks is None else sinks.data_ptr(),
        *(out.data_ptr(), kind_of(out.dtype)),
        *(rows, kv_heads, group, step, size, value_size, block, -(-group * step // block), slots),
    )

    most = min(rows * kv_heads * call.blocks, query.numel() * slots // _MANY)
    parts, size = max(1, min(torch.get_num_threads(), most)), scratch_size(call)
    scratch = torch.empty(parts * size)
    fields = scratch.data_ptr(), size, bits(scale), bits(softcap or 0.0), *call
    in_team(attend, fields, parts, holds=(query, key, value, mask, sinks, out, scratch))
    return out


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None) -> bool:
    """Whether these belong together, and the kernel can read them; their dtypes are left to `kind_of`."""
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
    """Whose last dimension lies in one piece."""
    return states if states.stride(-1) == 1 else states.contiguous()


def _places(states: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Where `[B, Hkv, K, D]` lies: its address, its strides and its dtype."""
    item, (row, head, step, _) = states.itemsize, states.stride()
    return states.data_ptr(), row * item, head * item, step * item, kind_of(states.dtype)


NAME = INVARIANT_ATTENTION
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def invariant_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' interface wants it, for inference.

    Args:
        module: the attention layer.
        query: `[B, H, S, D]`, float32, bfloat16 or float16; sums are in float32.
        key: `[B, Hkv, K, D]`.
        value: `[B, Hkv, K, Dv]`.
        attention_mask: a `PlacedMask`; None for queries that are the last of the keys, or of an encoder.
        dropout: has to be 0.
        scaling: factor of the scores; `D ** -0.5` if not given.
        softcap: scores s become softcap * tanh(s / softcap).
        s_aux: `[H]`, attention sinks: the score of one more key of each head, which has no value.
        kwargs: other arguments, among them `is_causal`.

    Returns:
        `[B, S, H, Dv]`, and no weights; 0 where a query sees nothing.

    Raises:
        ValueError: a mask of unknown positions, a bias of the scores, dropout, gradients, or states of another dtype,
            device or shape.
    """
    if dropout or kwargs.get("position_bias") is not None:
        raise ValueError(f'{NAME!r} has no dropout and no position bias: use attn_implementation="eager"')
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise ValueError(f"{NAME!r} has no gradients: call the model under torch.no_grad()")
    if query.device.type != "cpu":
        raise ValueError(f"{NAME!r} was given states on {query.device}, and is for the CPU: use lade.variant(model)")
    if query.dtype not in DTYPES:
        raise ValueError(f"{NAME!r} was given {query.dtype}, and is for 16 and 32 bits: use lade.variant(model)")
    if attention_mask is None:
        attention_mask = _mask_of(query, key, causal=_is_causal(module, kwargs))
    if not isinstance(attention_mask, PlacedMask):
        raise ValueError(
            f"{NAME!r} was given a mask {list(attention_mask.shape)} that does not say at which positions keys lie: "
            'give a mask of two dimensions, or use attn_implementation="sdpa"'
        )
    scale = max(query.shape[-1], 1) ** -0.5 if scaling is None else scaling
    return attention_of(query, key, value, attention_mask, scale, softcap, s_aux).to(query.dtype), None


def _is_causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    is_causal = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _mask_of(query: torch.Tensor, key: torch.Tensor, *, causal: bool) -> PlacedMask:
    """The mask of a pass that has none: all keys, or those before a query and its own."""
    rows, step, slots = len(query), query.shape[2], key.shape[2]
    allowed = torch.ones(step, slots, dtype=torch.bool, device=query.device)
    allowed = allowed.tril(slots - step) if causal else allowed
    positions = torch.arange(slots, device=query.device).expand(rows, -1)
    return PlacedMask.of(allowed.expand(rows, 1, -1, -1), positions)


AttentionInterface.register(NAME, invariant_attention)
AttentionMaskInterface.register(NAME, placed_mask)
