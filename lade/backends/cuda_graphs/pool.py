"""Buffer pools, one per model, and the passes captured on them.

Capturing a pass takes as long as many steps. What was captured holds addresses: of the buffers, which one generation
after another therefore acquires, and of the weights. So it serves as long as the model is set up as it was then.

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

from lade.backends.cuda_graphs.buffers import Buffers, Layers
from lade.backends.cuda_graphs.capture import Call, Capture, CudaCapture, EagerReplay, Recording
from lade.errors import CaptureWarning
from lade.locks import ForkSafeLock
from lade.model.facts import inner_tensors

logger = logging.getLogger(__name__)


@dataclass
class _Entry:
    """Buffers in use or idle, the setup of the model they were made for, and what captures passes on them."""

    setup: Hashable
    buffers: Buffers
    capture: Capture
    owner: weakref.ref[object] | None

    @property
    def idle(self) -> bool:
        return self.owner is None or self.owner() is None  # its generation was dropped before its end

    def suits(self, setup: Hashable, limit: int | None) -> bool:
        """Whether what was captured is valid, and the buffers are within the limit."""
        return self.setup == setup and (limit is None or self.buffers.rows * self.buffers.slots <= limit)

    def includes(self, other: _Entry) -> bool:
        """Whether these buffers serve wherever the other ones do."""
        held = other.buffers
        return self.setup == other.setup and self.buffers.fit(held.layers, held.rows, held.slots)


class BufferPool:
    """Buffers of one model. Of idle ones the largest is kept, until `free_idle`.

    Args:
        make_capture: makes what captures passes; called once for each set of buffers.
        setup: what captures depend on, see `lade.backends.cuda_graphs.pool.setup_of`. It is read at each `acquire`,
            and only buffers of the same setup serve.

    Attributes:
        capture_failed_in: the setup in which a capture has failed; None as long as none has.
    """

    def __init__(self, make_capture: Callable[[], Capture], setup: Callable[[], Hashable] = lambda: None) -> None:
        self._make_capture, self._setup = make_capture, setup
        self.capture_failed_in: Hashable = None
        self._entries: list[_Entry] = []
        self._lock = ForkSafeLock()

    def acquire(self, owner: object, layers: Layers, rows: int, slots: int, limit: int | None = None) -> Buffers:
        """Buffers of at least this size, all zero.

        Args:
            owner: uses them until they are released or discarded, or until it is garbage collected.
            layers: keys and values of each layer.
            rows: B, least number of rows.
            slots: least number of slots of each row.
            limit: slots of all rows together that larger buffers, which are there already, may have; None for no limit.

        Raises:
            torch.OutOfMemoryError: there is no memory for them.
        """
        setup = self._setup()
        with self._lock:
            for entry in self._entries:
                if entry.idle and entry.suits(setup, limit) and entry.buffers.fit(layers, rows, slots):
                    entry.owner = weakref.ref(owner)
                    entry.buffers.clear()
                    return entry.buffers
            self._entries = [entry for entry in self._entries if not entry.idle]  # freed before others are allocated
            buffers = Buffers(layers, rows, slots)
            self._entries.append(_Entry(setup, buffers, self._make_capture(), weakref.ref(owner)))
            return buffers

    def release(self, buffers: Buffers) -> None:
        """Keep the buffers for the next owner, and free other idle ones.

        Where others serve as well, or captures fail, these are freed instead.
        """
        with self._lock:
            mine = next((entry for entry in self._entries if entry.buffers is buffers), None)
            if mine is None:
                return
            mine.owner = None
            others = [entry for entry in self._entries if entry is not mine]
            if self.capture_failed_in is not None or any(other.includes(mine) for other in others):
                self._entries = others
            else:
                self._entries = [mine, *(entry for entry in others if not entry.idle)]

    def discard(self, buffers: Buffers) -> None:
        """Forget the buffers and what was captured on them: their memory is needed."""
        with self._lock:
            self._entries = [entry for entry in self._entries if entry.buffers is not buffers]

    def free_idle(self) -> None:
        """Forget all idle buffers and what was captured on them."""
        with self._lock:
            self._entries = [entry for entry in self._entries if not entry.idle]

    def record(self, buffers: Buffers, call: Call, fixed: Sequence[torch.Tensor]) -> Recording:
        """Capture a call that works on buffers of this pool; see `Capture.record`.

        Where that fails there is one `CaptureWarning`, and nothing is captured from then on: replays call again.

        Raises:
            torch.OutOfMemoryError: there is no memory for it; a later capture may succeed.
        """
        logger.debug("capturing a pass: %d rows, %d slots of each", buffers.rows, buffers.slots)
        entry = next(entry for entry in self._entries if entry.buffers is buffers)
        try:
            return entry.capture.record(call, fixed)
        except RuntimeError as problem:  # what a graph cannot hold; an error of the model's own comes again below
            first = _first(problem)
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            self.capture_failed(entry.setup, first)
            return entry.capture.record(call, fixed)

    def capture_failed(self, setup: Hashable, problem: BaseException) -> None:
        """Warn, once, and capture nothing from now on."""
        if self.capture_failed_in is not None:
            return
        self.capture_failed_in, self._make_capture = setup, EagerReplay
        for entry in self._entries:
            entry.capture = EagerReplay()
        why = _first(problem)
        logger.info("passes are not captured: %s: %s", type(why).__name__, why)
        warnings.warn(
            f"a pass of this model cannot be captured, and is slower without: {type(why).__name__}: "
            + (str(why).splitlines() or [""])[0],
            CaptureWarning,
            stacklevel=4,
        )


def _first(problem: BaseException) -> BaseException:
    """The error that came first: ending a capture that has failed fails, too."""
    while problem.__context__ is not None:
        problem = problem.__context__
    return problem


_pools: WeakKeyDictionary[PreTrainedModel, BufferPool] = WeakKeyDictionary()
_making = ForkSafeLock()


def pool_of(model: PreTrainedModel, device: torch.device) -> BufferPool:
    """The pool of a model, whose passes are captured as CUDA graphs on `device`; it is freed with the model.

    After a capture has failed there is a new pool as soon as the model's setup has changed.
    """
    with _making:
        pool = _pools.get(model)
        if pool is None or (pool.capture_failed_in is not None and pool.capture_failed_in != setup_of(model)):
            pool = _pools[model] = new_pool(model, lambda: CudaCapture(device))
        return pool


def new_pool(model: PreTrainedModel, make_capture: Callable[[], Capture]) -> BufferPool:
    """A pool for passes of this model, which it does not keep alive."""
    reference = weakref.ref(model)
    return BufferPool(make_capture, lambda: setup_of(reference()))


def free_idle_buffers(model: PreTrainedModel) -> bool:
    """Free the buffers of a model that no generation is using; whether it has a pool."""
    pool = _pools.get(model)
    if pool is not None:
        pool.free_idle()
    return pool is not None


def setup_of(model: Any) -> Hashable:
    """What a captured pass depends on beside its inputs: addresses of the weights, and the choice of kernels."""
    config = model.config.get_text_config(decoder=True)
    tensors = chain(model.parameters(), model.buffers())
    return (
        config._attn_implementation,
        getattr(config, "_experts_implementation", None),
        model.training,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        tuple((id(tensor), *map(_address, inner_tensors(tensor))) for tensor in tensors),
    )


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # packed weights have no memory that could be pointed at
        return 0
