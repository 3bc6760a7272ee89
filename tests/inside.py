"""Where tests look inside: a private name that several of them need is spelled here, once."""

from __future__ import annotations

from typing import Any

from torch import nn

from lade import Engine
from lade.backends.cuda_graphs.pool import BufferPool
from lade.serving.batch import EngineBatch
from lade.serving.handle import Handle
from lade.serving.prefix_cache import PrefixCache


def buffers_in(pool: BufferPool) -> list[Any]:
    """Buffers that a pool has lent, or keeps idle, each with its capture."""
    return pool._entries


def hooks_of(model: nn.Module) -> list[Any]:
    """Hooks on the forward passes of a model and all its parts."""
    parts = list(model.modules())
    return [hook for each in parts for kind in (each._forward_pre_hooks, each._forward_hooks) for hook in kind.values()]


def attention_name_of(model: Any) -> str:
    """The attention implementation that a model was set to."""
    name: str = model.config._attn_implementation
    return name


def force_attention(model: Any, name: str) -> None:
    """Set an implementation that transformers would not let through here."""
    model.config._attn_implementation = name


def lock_of(engine: Engine) -> Any:
    """What the decoding thread takes to admit requests, and to forget those that have ended."""
    return engine._scheduler._changed


def capacity_of(engine: Engine) -> Any:
    """What decides how many requests fit."""
    return engine._scheduler._capacity


def batch_of(engine: Engine) -> EngineBatch:
    """What an engine decodes; only for what no snapshot tells."""
    return engine._scheduler._batch


def cache_of(batch: EngineBatch) -> Any:
    """The cache of a batch's rows: a `TreeCache`, or a `FallbackCache`."""
    return batch._cache


def rows_of(batch: EngineBatch) -> list[Any]:
    """The rows that a batch decodes."""
    return batch._loop.rows


def runner_of(batch: EngineBatch) -> Any:
    """Makes the passes over drafts; the one of prompts may be another."""
    return batch._runner


def prefix_cache_of(batch: EngineBatch) -> Any:
    """The texts that are kept for later prompts."""
    return batch._reuse.prefix_cache


def texts_of(prefix_cache: PrefixCache) -> list[Any]:
    """The texts that it keeps, the one used least lately first."""
    return list(prefix_cache._texts)


def counters_of(batch: EngineBatch) -> Any:
    """What a batch has counted so far."""
    return batch.tally._totals


def prefill_runner_of(batch: EngineBatch) -> Any:
    """Makes the passes over prompts."""
    return batch._prefill_runner


def steps_of(handle: Handle) -> list[Any]:
    """The steps that a handle has been told, without waiting for its end."""
    return handle._steps


def result_of(handle: Handle) -> Any:
    """What a handle ended with, without raising it: `None` as long as it goes on, or where it was cancelled."""
    return handle._result


def watchers_of(handle: Handle) -> Any:
    """The coroutines that wait for a handle."""
    return handle._watchers
