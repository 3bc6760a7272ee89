"""The buffer pool of each model, and the setup of a model that captured passes depend on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from lade.locks import ForkSafeLock
from lade.model.cuda_graphs.capture import Capture, CudaCapture
from lade.model.cuda_graphs.pool import BufferPool
from lade.model.weights import parts_of

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
        tuple((id(tensor), *map(_address, parts_of(tensor))) for tensor in tensors),
    )


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # packed weights have no memory that could be pointed at
        return 0
