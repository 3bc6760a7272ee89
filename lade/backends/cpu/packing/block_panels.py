"""The layout of integer codes in panels, drawn in `lade/native/cpu_blocks.h`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import pad

from lade.backends.cpu.packing.weight import HugePages

GROUP = 32
"""Inputs that share a scale, in most formats."""
BLOCK = 64
"""Inputs of a block of a panel."""
PANEL = 16
"""Outputs of a panel."""
_LINE = 64  # bytes of a line of a panel


def in_block_panels(parts: Mapping[str, torch.Tensor], bits: int, pages: HugePages) -> torch.Tensor:
    """Return a weight in panels, padded with zeros.

    Args:
        parts: tensors of `BlockCodes` by their names, left unchanged.
        bits: bits of a code.
        pages: memory pool to allocate from.

    Returns:
        `[out / 16, in / 64, lines, 64]` int8: a head of one or two lines, and lines of codes for each block.
    """
    outputs, inputs = parts["values"].shape
    blocks = -(-inputs // BLOCK)
    head = torch.cat([_head(each, inputs) for name, each in parts.items() if name != "values"], -1)
    head = pad(head, (0, -head.shape[-1] % _LINE)).view(len(head), blocks, -1, _LINE)
    values = pad(parts["values"], (0, -inputs % BLOCK, 0, -outputs % PANEL))
    codes = _in_lines(values.view(-1, PANEL, blocks, BLOCK), bits)
    shape = (len(head), blocks, head.shape[2] + codes.shape[2], _LINE)
    panels = pages.take(shape[0] * shape[1] * shape[2] * _LINE).view(shape)
    panels[:, :, : head.shape[2]], panels[:, :, head.shape[2] :] = head, codes.view(torch.int8)
    return panels


def out_of_block_panels(panels: torch.Tensor, like: Mapping[str, torch.Tensor], bits: int) -> dict[str, torch.Tensor]:
    """Invert `in_block_panels`; `like` has the shapes and dtypes of the tensors."""
    outputs, inputs = like["values"].shape
    count, blocks = panels.shape[:2]
    lines = panels[:, :, -BLOCK * PANEL * bits // 8 // _LINE :].contiguous().view(torch.uint8)
    values = _out_of_lines(lines, bits).reshape(count * PANEL, blocks * BLOCK)
    found, head, first = {"values": values[:outputs, :inputs].contiguous()}, panels.flatten(2), 0
    for name, each in like.items():
        if name != "values":
            per_block = _per_block(each, inputs)
            size = PANEL * each.element_size() * per_block
            piece = head[:, :, first : first + size].contiguous().view(each.dtype)  # [panels, blocks, n * 16]
            piece = piece.unflatten(2, (-1, PANEL)).permute(0, 3, 1, 2).flatten(2).flatten(0, 1)  # [out, blocks * n]
            piece = piece[:outputs, :: 4 if per_block == 1 else 1][:, : each.shape[1]]
            found[name] = piece.clone(memory_format=torch.contiguous_format)
            first += size
    return found


def _per_block(part: torch.Tensor, inputs: int) -> int:
    """Return the numbers of an output and block: those of its groups, or one that four blocks repeat."""
    if 4 * part.shape[1] <= -(-inputs // BLOCK):
        return 1
    return 2 if part.shape[1] <= -(-inputs // GROUP) else 4


def _head(part: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return the numbers of all groups, or of 256 inputs each, by panel and block: `[panels, blocks, bytes]` int8."""
    blocks, count = -(-inputs // BLOCK), _per_block(part, inputs)
    part = part.repeat_interleave(4, 1) if count == 1 else part
    filled = pad(part, (0, blocks * count - part.shape[1], 0, -len(part) % PANEL)).view(-1, PANEL, blocks, count)
    return filled.permute(0, 2, 3, 1).flatten(2).contiguous().view(torch.int8)


def _in_lines(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes `[panels, 16, blocks, 64]` uint8 in lines, `[panels, blocks, lines, 64]`."""
    if bits == 4:
        parts = values.unflatten(3, (2, 2, 4, 4))  # half, half of that, word of four inputs, input
        values = parts[:, :, :, :, 0] | parts[:, :, :, :, 1] << 4
    words = values.reshape(*values.shape[:3], -1, 4)  # [panels, 16, blocks, words, 4]
    return words.permute(0, 2, 3, 1, 4).reshape(len(words), words.shape[2], -1, _LINE)


def _out_of_lines(lines: torch.Tensor, bits: int) -> torch.Tensor:
    """Invert `_in_lines`."""
    words = lines.view(*lines.shape[:3], PANEL, 4).permute(0, 3, 1, 2, 4)  # [panels, 16, blocks, words, 4]
    if bits == 4:
        halves = words.unflatten(3, (2, 4))
        words = torch.stack([halves & 15, halves >> 4], 4)  # half, half of that, word, input
    return words.flatten(3)
