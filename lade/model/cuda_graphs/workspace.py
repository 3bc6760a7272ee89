"""Buffers and captured passes of a model, which outlive a generation: capturing one takes as long as many steps.

What was captured holds addresses: of the cache's buffers, which are therefore lent to one generation after another, and
of the weights. So it is good for as long as the model is set up as it was, and is dropped otherwise.

Passes on the same buffers share their scratch memory, since they run one at a time. Those on different buffers do not:
two threads may generate at once.
"""

from __future__ import annotations

import logging
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
from lade.locks import ForkSafeLock
from lade.model.cuda_graphs.buffers import Buffers, Layers
from lade.model.cuda_graphs.capture import Call, Capture, CudaCapture, Recording, Rerun
from lade.model.cuda_graphs.static_cache import StaticCache
from lade.model.runner import input_device
from lade.model.support.supports import unwrap
from lade.model.weights import parts_of

logger = logging.getLogger(__name__)


@dataclass
class _Entry:
    """Buffers that are lent, or idle, and what captures passes on them."""

    setup: Hashable
    buffers: Buffers
    capture: Capture
    borrower: weakref.ref[object] | None

    @property
    def idle(self) -> bool:
        return self.borrower is None or self.borrower() is None  # a generation that nobody ended

    def suits(self, setup: Hashable, limit: int | None) -> bool:
        """Whether what was captured holds, and the buffers are no larger than they may be."""
        return self.setup == setup and (limit is None or self.buffers.rows * self.buffers.slots <= limit)


class Workspace:
    """Lends buffers of one model. Of those that nobody uses one is kept, until they are released.

    Args:
        make_capture: makes what captures passes; called for each buffers anew.

    Attributes:
        trouble: the setup in which a capture has failed, if one has.
    """

    def __init__(self, make_capture: Callable[[], Capture]) -> None:
        self._make_capture = make_capture
        self.trouble: Hashable = None
        self._entries: list[_Entry] = []
        self._lock = ForkSafeLock()

    def cache(self, setup: Callable[[], Hashable], tokens: int | None = None, limit: int | None = None) -> StaticCache:
        """An empty cache on buffers of this workspace.

        Args:
            setup: tells that of the model, see `setup_of`, whenever buffers are lent; only those of the same one are.
            tokens: see `StaticCache`.
            limit: likewise.
        """
        return StaticCache(tokens, limit=limit, lender=_Desk(self, setup))

    def record(self, buffers: Buffers, call: Call, fixed: Sequence[torch.Tensor]) -> Recording:
        """Capture a call that works on buffers of this workspace; see `Capture.record`.

        Where that fails there is one `CaptureWarning`, and nothing is captured any more: replays call again.

        Raises:
            torch.OutOfMemoryError: it fails for lack of memory; next time there may be some.
        """
        logger.debug("capturing a pass: %d rows, %d slots of each", buffers.rows, buffers.slots)
        entry = next(entry for entry in self._entries if entry.buffers is buffers)
        try:
            return entry.capture.record(call, fixed)
        except RuntimeError as problem:  # whatever a model does that a graph cannot hold; if it is wrong, so is a rerun
            first = _first(problem)
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            self.fail(entry.setup, first)
            return entry.capture.record(call, fixed)

    def fail(self, setup: Hashable, problem: BaseException) -> None:
        """A capture has failed: warn, once, and capture nothing any more."""
        if self.trouble is not None:
            return
        self.trouble, self._make_capture = setup, Rerun
        for entry in self._entries:
            entry.capture = Rerun()
        why = _first(problem)
        logger.info("passes are not captured: %s: %s", type(why).__name__, why)
        warnings.warn(
            f"a pass of this model cannot be captured, and is slower without: {type(why).__name__}: "
            + (str(why).splitlines() or [""])[0],
            CaptureWarning,
            stacklevel=4,
        )

    def release(self) -> None:
        """Free the buffers that nobody uses, and what was captured on them."""
        with self._lock:
            self._entries = [entry for entry in self._entries if not entry.idle]

    def lend(
        self, setup: Hashable, borrower: object, layers: Layers, rows: int, slots: int, limit: int | None
    ) -> Buffers:
        """See `lade.model.cuda_graphs.pool.Lender.lend`."""
        with self._lock:
            for entry in self._entries:
                if entry.idle and entry.suits(setup, limit) and entry.buffers.fit(layers, rows, slots):
                    entry.borrower = weakref.ref(borrower)
                    entry.buffers.clear()
                    return entry.buffers
            self._entries = [entry for entry in self._entries if not entry.idle]  # frees them before others are made
            buffers = Buffers(layers, rows, slots)
            self._entries.append(_Entry(setup, buffers, self._make_capture(), weakref.ref(borrower)))
            return buffers

    def take_back(self, buffers: Buffers) -> None:
        """Keep them, unless larger ones are kept, or they are of no use; then drop the others that are idle."""
        with self._lock:
            mine = next((entry for entry in self._entries if entry.buffers is buffers), None)
            if mine is None:
                return
            mine.borrower = None
            others = [entry for entry in self._entries if entry is not mine]
            if self.trouble is not None or any(_includes(other, mine) for other in others):
                self._entries = others
            else:
                self._entries = [mine, *(entry for entry in others if not entry.idle)]

    def drop(self, buffers: Buffers) -> None:
        """Forget them, and what was captured on them."""
        with self._lock:
            self._entries = [entry for entry in self._entries if entry.buffers is not buffers]


@dataclass(frozen=True)
class _Desk:
    """Where a cache borrows; see `lade.model.cuda_graphs.pool.Lender`."""

    workspace: Workspace
    setup: Callable[[], Hashable]

    def lend(self, borrower: object, layers: Layers, rows: int, slots: int, limit: int | None) -> Buffers:
        return self.workspace.lend(self.setup(), borrower, layers, rows, slots, limit)

    def take_back(self, buffers: Buffers) -> None:
        self.workspace.take_back(buffers)

    def drop(self, buffers: Buffers) -> None:
        self.workspace.drop(buffers)


def _includes(one: _Entry, other: _Entry) -> bool:
    held = other.buffers
    return one.setup == other.setup and one.buffers.fit(held.layers, held.rows, held.slots)


def _first(problem: BaseException) -> BaseException:
    """What went wrong first: ending a capture that has failed fails, too."""
    while problem.__context__ is not None:
        problem = problem.__context__
    return problem


_workspaces: WeakKeyDictionary[PreTrainedModel, Workspace] = WeakKeyDictionary()
_making = ForkSafeLock()


def workspace_of(model: PreTrainedModel, device: torch.device) -> Workspace:
    """The workspace of a model, which captures CUDA graphs; it goes with the model.

    After a failure it is made anew once the model is set up otherwise.
    """
    with _making:
        workspace = _workspaces.get(model)
        if workspace is None or (workspace.trouble is not None and workspace.trouble != setup_of(model)):
            workspace = _workspaces[model] = Workspace(lambda: CudaCapture(device))
        return workspace


def release(model: Any) -> None:
    """Give back the memory that captured passes of a model have taken on its CUDA device.

    That is the keys and values of one cache, and the graphs that were captured on them. They stay when a generation
    ends, for the next one, and go with the model; after `release` the next generation makes and captures them anew.
    What a generation or a `lade.Engine` is using stays until that is done; call again then. Nothing happens where
    nothing was captured, on a CPU for one.

    >>> lade.generate(model, **inputs)
    >>> lade.release(model)

    Args:
        model: a transformers causal language model, or one wrapped by PEFT.
    """
    inner = unwrap(model)
    workspace = _workspaces.get(inner)
    if workspace is None:
        return
    workspace.release()
    if input_device(inner).type == "cuda":
        torch.cuda.empty_cache()  # graphs have a memory pool of their own, which nobody else can use before


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
