"""Products without a choice of kernels: what a GPU does for a fixed number of rows, on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


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
