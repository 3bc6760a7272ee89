"""Buffers and captured passes of a model, which outlive a generation: capturing one takes as long as many steps.

What was captured holds addresses: of the cache's buffers, which are therefore lent to one generation after another, and
of the weights. So it is good for as long as the model is set up as it was, and is dropped otherwise.

Passes on the same buffers share their scratch memory, since they run one at a time. Those on different buffers do not:
two threads may generate at once.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from lade.errors import CaptureWarning
from lade.model.capture import Call, Capture, CudaCapture, Recording, Rerun
from lade.model.static_buffers import Buffers, States
from lade.model.static_cache import StaticCache
from lade.model.weights import parts_of


@dataclass
class _Entry:
    """Buffers that are lent, or idle, and what captures passes on them."""

    setup: Hashable
    buffers: Buffers
    capture: Capture
    borrower: weakref.ref[StaticCache] | None

    @property
    def idle(self) -> bool:
        return self.borrower is None or self.borrower() is None  # a generation that nobody ended


class Workspace:
    """Lends buffers of one model. Of those that nobody uses one is kept.

    Args:
        make_capture: makes what captures passes; called for each buffers anew.

    Attributes:
        trouble: the setup in which a capture has failed, if one has.
    """

    def __init__(self, make_capture: Callable[[], Capture]) -> None:
        self._make_capture = make_capture
        self.trouble: Hashable = None
        self._entries: list[_Entry] = []
        self._lock = threading.Lock()

    def cache(self, tokens: int, setup: Hashable) -> StaticCache:
        """An empty cache for rows of at most so many tokens, on buffers of this workspace.

        Args:
            tokens: see `StaticCache`.
            setup: of the model, see `setup_of`; only buffers of the same one are used again.
        """

        def lend(borrower: StaticCache, layers: Sequence[tuple[States, States]], rows: int, slots: int) -> Buffers:
            return self._lend(setup, borrower, layers, rows, slots)

        return StaticCache(tokens, lend, self._take_back)

    def record(self, buffers: Buffers, call: Call, fixed: Sequence[torch.Tensor], setup: Hashable) -> Recording:
        """Capture a call that works on buffers of this workspace; see `Capture.record`.

        Where that fails there is one `CaptureWarning`, and nothing is captured any more: replays call again.
        """
        entry = next(entry for entry in self._entries if entry.buffers is buffers)
        try:
            return entry.capture.record(call, fixed)
        except RuntimeError as problem:  # whatever a model does that a graph cannot hold; if it is wrong, so is a rerun
            self.fail(setup, problem)
            return entry.capture.record(call, fixed)

    def fail(self, setup: Hashable, problem: BaseException) -> None:
        """A capture has failed: warn, once, and capture nothing any more."""
        if self.trouble is not None:
            return
        self.trouble, self._make_capture = setup, Rerun
        for entry in self._entries:
            entry.capture = Rerun()
        why = _first(problem)
        warnings.warn(
            f"a pass of this model cannot be captured, and is slower without: {type(why).__name__}: "
            + (str(why).splitlines() or [""])[0],
            CaptureWarning,
            stacklevel=4,
        )

    def _lend(
        self,
        setup: Hashable,
        borrower: StaticCache,
        layers: Sequence[tuple[States, States]],
        rows: int,
        slots: int,
    ) -> Buffers:
        with self._lock:
            for entry in self._entries:
                if entry.idle and entry.setup == setup and entry.buffers.fit(layers, rows, slots):
                    entry.borrower = weakref.ref(borrower)
                    entry.buffers.clear()
                    return entry.buffers
            self._entries = [entry for entry in self._entries if not entry.idle]  # frees them before others are made
            buffers = Buffers(layers, rows, slots)
            self._entries.append(_Entry(setup, buffers, self._make_capture(), weakref.ref(borrower)))
            return buffers

    def _take_back(self, buffers: Buffers) -> None:
        """Keep them, unless larger ones are kept; then drop the others that are idle."""
        with self._lock:
            mine = next((entry for entry in self._entries if entry.buffers is buffers), None)
            if mine is None:
                return
            mine.borrower = None
            others = [entry for entry in self._entries if entry is not mine]
            if any(_includes(other, mine) for other in others):
                self._entries = others
            else:
                self._entries = [mine, *(entry for entry in others if not entry.idle)]


def _includes(one: _Entry, other: _Entry) -> bool:
    held = other.buffers
    return one.setup == other.setup and one.buffers.fit(held.layers, held.rows, held.slots)


def _first(problem: BaseException) -> BaseException:
    """What went wrong first: ending a capture that has failed fails, too."""
    while problem.__context__ is not None:
        problem = problem.__context__
    return problem


_workspaces: WeakKeyDictionary[PreTrainedModel, Workspace] = WeakKeyDictionary()


def workspace_of(model: PreTrainedModel, device: torch.device) -> Workspace:
    """The workspace of a model, which captures CUDA graphs; it goes with the model.

    After a failure it is made anew once the model is set up otherwise.
    """
    workspace = _workspaces.get(model)
    if workspace is None or (workspace.trouble is not None and workspace.trouble != setup_of(model)):
        workspace = _workspaces[model] = Workspace(lambda: CudaCapture(device))
    return workspace


def setup_of(model: Any) -> Hashable:
    """What a captured pass depends on beside its inputs: where the weights lie, and which kernels are chosen."""
    config = model.config.get_text_config(decoder=True)
    tensors = chain(model.parameters(), model.buffers())
    return (
        config._attn_implementation,
        getattr(config, "_experts_implementation", None),
        model.training,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        tuple((id(tensor), *map(_address, parts_of(tensor))) for tensor in tensors),
    )


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # packed weights have no memory that could be pointed at
        return 0
