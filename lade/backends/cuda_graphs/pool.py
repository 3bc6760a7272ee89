"""Buffer pools, one per model, and the passes captured on them.

A capture takes as long as many steps. Captured passes contain addresses: of the buffers, which are therefore reused by
one generation after another, and of the weights. So they are valid as long as the model's setup does not change.

Passes on the same buffers share scratch memory, since they run one at a time. Passes on different buffers do not, since
two threads may generate concurrently.
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

from lade.backends.cuda_graphs.buffers import Buffers, Call, Capture, CudaCapture, EagerReplay, Layers, Replay
from lade.errors import CaptureWarning
from lade.locks import ForkSafeLock
from lade.model.facts import inner_tensors, is_invariant

logger = logging.getLogger(__name__)


@dataclass
class _Entry:
    """Buffers, in use or idle, with the model setup they were made for and their capture."""

    setup: Hashable
    buffers: Buffers
    capture: Capture
    owner: weakref.ref[object] | None

    @property
    def idle(self) -> bool:
        """True if no generation uses the buffers."""
        return self.owner is None or self.owner() is None  # or its generation was garbage collected

    def suits(self, setup: Hashable, limit: int | None) -> bool:
        """Return True if captures are valid for this setup, and the buffers are within the limit."""
        return self.setup == setup and (limit is None or self.buffers.rows * self.buffers.slots <= limit)

    def covers(self, other: _Entry) -> bool:
        """Return True if these buffers can replace the other ones."""
        held = other.buffers
        return self.setup == other.setup and self.buffers.fit(held.layers, held.rows, held.slots)


class BufferPool:
    """Buffers of one model, each with a capture of its own. Of idle ones only the largest are kept, until `free_idle`.

    Only buffers of the same setup are reused, see `capture_setup`.
    """

    def __init__(self, make_capture: Callable[[], Capture], setup: Callable[[], Hashable] = lambda: None) -> None:
        self._make_capture, self._setup = make_capture, setup
        self.capture_failed_in: Hashable = None  # the setup in which a capture has failed, if one has
        self.fusion_failed_in: Hashable = None  # the one in which a fused pass differed from the model's own
        self._entries: list[_Entry] = []
        self._lock = ForkSafeLock()

    @property
    def setup(self) -> Hashable:
        """The state that captures depend on now, see `capture_setup`."""
        return self._setup()

    @property
    def in_use(self) -> bool:
        """True if a generation or an engine uses buffers of this pool."""
        with self._lock:
            return not all(entry.idle for entry in self._entries)

    def acquire(self, owner: object, layers: Layers, rows: int, slots: int, limit: int | None = None) -> Buffers:
        """Return buffers of at least this size, all zero.

        The owner uses them until they are released or discarded, or until it is garbage collected. Existing buffers
        that are larger than asked for have no more slots over all rows than `limit`, if there is one.

        Raises:
            torch.OutOfMemoryError: there is no memory for new buffers.
        """
        setup = self._setup()
        with self._lock:
            for entry in self._entries:
                if entry.idle and entry.suits(setup, limit) and entry.buffers.fit(layers, rows, slots):
                    entry.owner = weakref.ref(owner)
                    entry.buffers.clear()
                    return entry.buffers
            self._entries = [entry for entry in self._entries if not entry.idle]  # freed before new ones are allocated
            buffers = Buffers(layers, rows, slots)
            self._entries.append(_Entry(setup, buffers, self._make_capture(), weakref.ref(owner)))
            return buffers

    def release(self, buffers: Buffers) -> None:
        """Keep the buffers for the next owner, and free other idle ones.

        If other buffers can replace them, or captures fail, they are freed instead.
        """
        with self._lock:
            mine = next((entry for entry in self._entries if entry.buffers is buffers), None)
            if mine is None:
                return
            mine.owner = None
            others = [entry for entry in self._entries if entry is not mine]
            if self.capture_failed_in is not None or any(other.covers(mine) for other in others):
                self._entries = others
            else:
                self._entries = [mine, *(entry for entry in others if not entry.idle)]

    def discard(self, buffers: Buffers) -> None:
        """Drop the buffers and the passes captured on them."""
        with self._lock:
            self._entries = [entry for entry in self._entries if entry.buffers is not buffers]

    def free_idle(self) -> None:
        """Drop all idle buffers and the passes captured on them."""
        with self._lock:
            self._entries = [entry for entry in self._entries if not entry.idle]

    def record(self, buffers: Buffers, call: Call, fixed: Sequence[torch.Tensor]) -> Replay:
        """Capture a call that works on buffers of this pool; see `Capture.record`.

        If that fails, one `CaptureWarning` is issued, and nothing is captured from then on: replays call again.

        Raises:
            torch.OutOfMemoryError: there is no memory for the capture; a later one may succeed.
        """
        logger.debug("capturing a pass: %d rows, %d slots of each", buffers.rows, buffers.slots)
        entry = next(entry for entry in self._entries if entry.buffers is buffers)
        try:
            return entry.capture.record(call, fixed)
        except RuntimeError as problem:  # not capturable; an error of the model itself is raised again below
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
            f"a pass of this model cannot be captured, so it runs eagerly, which is slower: {type(why).__name__}: "
            + (str(why).splitlines() or [""])[0],
            CaptureWarning,
            stacklevel=4,
        )


def _first(problem: BaseException) -> BaseException:
    """Return the first error of a chain: ending a failed capture fails as well."""
    while problem.__context__ is not None:
        problem = problem.__context__
    return problem


_pools: WeakKeyDictionary[PreTrainedModel, BufferPool] = WeakKeyDictionary()
_making = ForkSafeLock()


def pool_of(model: PreTrainedModel, device: torch.device) -> BufferPool:
    """Return the pool of a model, whose passes are captured as CUDA graphs on `device`; it is freed with the model.

    After a failed capture, a new pool is made once the model's setup has changed.
    """
    with _making:
        pool = _pools.get(model)
        if pool is None or (pool.capture_failed_in is not None and pool.capture_failed_in != capture_setup(model)):
            pool = _pools[model] = new_pool(model, lambda: CudaCapture(device))
        return pool


def new_pool(model: PreTrainedModel, make_capture: Callable[[], Capture]) -> BufferPool:
    """Return a pool for passes of a model, which it does not keep alive."""
    reference = weakref.ref(model)
    return BufferPool(make_capture, lambda: capture_setup(reference()))


def free_idle_buffers(model: PreTrainedModel) -> bool:
    """Free buffers of a model that no generation uses; return True if the model has a pool."""
    pool = _pools.get(model)
    if pool is not None:
        pool.free_idle()
    return pool is not None


def capture_setup(model: Any) -> Hashable:
    """Return what captured passes depend on in addition to their inputs: weight addresses and the choice of kernels."""
    config = model.config.get_text_config(decoder=True)
    tensors = chain(model.parameters(), model.buffers())
    return (
        config._attn_implementation,
        getattr(config, "_experts_implementation", None),
        model.training,
        is_invariant(model),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        tuple((id(tensor), *map(_address, inner_tensors(tensor))) for tensor in tensors),
    )


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # packed weights have no address
        return 0
