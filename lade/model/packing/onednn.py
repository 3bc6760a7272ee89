"""oneDNN, whose operators in PyTorch are private: whether they are there is known when they are called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lade.errors import UnsupportedModelError


@contextmanager
def required(kernel: str, remedy: str) -> Iterator[None]:
    """Try a kernel in this block.

    Args:
        kernel: that is tried, such as "int8 kernel".
        remedy: where there is none.

    Raises:
        UnsupportedModelError: this build of PyTorch, or this processor, has none.
    """
    try:
        if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
            raise RuntimeError("torch.backends.mkldnn is not available or not enabled")
        yield
    except (RuntimeError, AttributeError) as problem:
        reason = str(problem).partition("\n")[0]
        raise UnsupportedModelError(f"PyTorch has no {kernel} here ({reason})", remedy) from problem
