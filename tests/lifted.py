"""Recurrent layers without their float32: transformers' functions compute in it whatever the model is.

What rounds to float32 hides a formula that is only nearly right. Here everything is float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def float32_lifted() -> Iterator[None]:
    """While the context lasts, what is converted to float32 becomes float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch, "float32", torch.float64)
        yield
