"""Kinds of numbers, as compiled functions are told of them."""

from __future__ import annotations

import torch

BFLOAT16, FLOAT16 = 1, 2
"""Kinds of two bytes; float32 is 0."""
_KINDS = {torch.float32: 0, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


def kind_of(dtype: torch.dtype) -> int:
    """The number of a dtype."""
    return _KINDS[dtype]
