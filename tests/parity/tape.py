"""A capture on the CPU that forgets as much as a CUDA graph does.

The operations of a call are written down with the tensors they read and wrote. A replay does these again, on these
tensors, and runs no Python of the model: a number that the host computed stays what it was. As in a graph nothing may
look at a tensor's content to decide what comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lade.backends.cuda_graphs.buffers import Call, Capture, Replay, ResultMemory

WAITS = frozenset(
    ["_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique_consecutive", "_unique2", "item"]
)


class Tape:
    """See `lade.backends.cuda_graphs.buffers.Capture`."""

    def __init__(self) -> None:
        self._results = ResultMemory()

    def record(self, call: Call, fixed: Sequence[torch.Tensor]) -> Replay:
        result = self._results.like(call())
        with _Writer() as writer:
            result.copy_(call())

        @torch.inference_mode()  # a graph asks for no mode either
        def replay(call: Call) -> torch.Tensor:
            for func, args, kwargs, before in writer.steps:
                after = func(*args, **kwargs)
                for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # else a view, or in place
                        old.copy_(new)
            return result

        return replay


@dataclass
class Counts:
    """How often something was captured, and how often it was done again."""

    recorded: int = 0
    replayed: int = 0


class Counted:
    """Another capture; its recordings and replays are counted."""

    def __init__(self, capture: Capture, counts: Counts) -> None:
        self._capture, self._counts = capture, counts

    def record(self, call: Call, fixed: Sequence[torch.Tensor]) -> Replay:
        replay = self._capture.record(call, fixed)
        self._counts.recorded += 1

        def counted(call: Call) -> torch.Tensor:
            self._counts.replayed += 1
            return replay(call)

        return counted


class _Writer(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in WAITS or (name.startswith("index") and _by_mask(args)):
            raise RuntimeError(f"{name} is not permitted when a stream is capturing")
        output = func(*args, **(kwargs or {}))
        self.steps.append((func, *tree_map(_where_it_lies, (args, kwargs or {})), output))
        return output


def _where_it_lies(value: Any) -> Any:
    """The memory of a tensor, whatever becomes of the object: a parameter may be given other memory."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def _by_mask(args: Any) -> bool:
    return any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in tree_leaves(args[1:2]))
