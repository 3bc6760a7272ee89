"""Weights in codes of every format, drawn at random."""

import torch

from lade.backends.cpu.packing.blocks import BlockCodes
from lade.backends.cpu.packing.integers import int4_codes, int8_codes

MADE_HERE = ("int8", "int4")
OF_FILES = ("q8_0", "q4_0", "q4_1", "q5_1", "q4_k", "q5_k", "q6_k")
FORMATS = (*MADE_HERE, *OF_FILES)
STEPS = {"int8": 1, "int4": 1, "q8_0": 32, "q4_0": 32, "q4_1": 32, "q5_1": 32, "q4_k": 256, "q5_k": 256, "q6_k": 256}
"""What numbers of inputs are multiples of."""


def drawn_codes(name: str, outputs: int, inputs: int, seed: int = 0) -> BlockCodes:
    """Codes that files of this type may hold, with scales of both signs."""
    generator = torch.Generator().manual_seed(seed)
    if name in MADE_HERE:
        weight = torch.randn(outputs, inputs, generator=generator)
        return int8_codes(weight) if name == "int8" else int4_codes(weight)

    def bytes_below(most, columns):
        return torch.randint(0, most, (outputs, columns), generator=generator).to(torch.uint8)

    def halves(columns):
        return (torch.randn(outputs, columns, generator=generator) * 0.01).half()

    groups, many = inputs // 32, inputs // 256
    if name in ("q8_0", "q4_0"):
        bits = int(name[1])
        return BlockCodes(name, bits, bytes_below(2**bits, inputs), halves(groups))
    if name in ("q4_1", "q5_1"):
        bits, most = (4, 16) if name == "q4_1" else (8, 32)
        return BlockCodes(name, bits, bytes_below(most, inputs), halves(groups), halves(groups))
    if name == "q6_k":
        scale = bytes_below(256, 2 * groups).view(torch.int8)
        return BlockCodes(name, 8, bytes_below(64, inputs) + 96, scale, factor=halves(many))
    bits, most = (4, 16) if name == "q4_k" else (8, 32)
    scale, minimum = bytes_below(64, groups), bytes_below(64, groups)
    return BlockCodes(name, bits, bytes_below(most, inputs), scale, minimum, halves(many), halves(many))
