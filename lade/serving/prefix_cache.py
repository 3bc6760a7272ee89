"""Prefix cache: keys, values and logits of finished texts, reused by prompts that begin like them.

Each text has a copy of its own. The longest common prefix is found by comparing ids, which is exact and takes less than
a millisecond for a few dozen texts.

On a prefix hit a prompt is not fed again, so a drafter that learns from logits would know less than after a full
prefill. Therefore the top-k entries of the logits are stored along with keys and values, as far as they were computed,
and replayed into the drafter.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lade.decoding.drafting.drafter import Draft, Drafter, ForwardingDrafter
from lade.decoding.kernels.layout import WIDTH, Ints
from lade.decoding.readout import Readout
from lade.decoding.row import Row
from lade.decoding.verify import Verdict
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.serving.running import ActiveRequest

MIN_PREFIX = 32  # minimum length of a shared prefix in tokens, below which a copy does not pay

Tokens = npt.NDArray[np.int64]
Scope = tuple[str | None, Hashable]
"""Tenant that may reuse a text, None for requests without one, and the model's state, see `state_of`."""
SAMPLED_WEIGHTS = 16
"""Weights of which a value is part of a model's state: enough to see a step of training that wrote through `.data`."""

logger = logging.getLogger(__name__)


class CachedLogits:
    """Entries of the logits at the tokens of a text, as far as known; see `layout`."""

    def __init__(self) -> None:
        self._entries = np.empty((0, WIDTH), np.int32)  # [L, WIDTH]
        self._known = np.empty(0, np.bool_)  # [L]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._entries.nbytes + self._known.nbytes

    def put(self, start: int, entries: Ints) -> None:
        """Store entries `[T, WIDTH]` for the tokens from index `start` on."""
        end = start + len(entries)
        if end > len(self._known):
            more = max(end, 2 * len(self._known)) - len(self._known)
            self._entries = np.concatenate([self._entries, np.zeros((more, WIDTH), np.int32)])
            self._known = np.concatenate([self._known, np.zeros(more, np.bool_)])
        self._entries[start:end], self._known[start:end] = entries, True

    def first(self, tokens: int) -> CachedLogits:
        """Return a copy for the first `tokens` tokens."""
        copy = CachedLogits()
        copy._entries, copy._known = self._entries[:tokens].copy(), self._known[:tokens].copy()
        return copy

    def runs(self, tokens: int) -> Iterator[tuple[int, Ints]]:
        """Yield the runs of known tokens among the first `tokens`: index of the first one, and entries `[T, WIDTH]`."""
        known = np.concatenate([[False], self._known[:tokens], [False]])
        edges = np.flatnonzero(known[1:] != known[:-1])
        for start, end in edges.reshape(-1, 2).tolist():
            yield start, self._entries[start:end]


class RecordingDrafter(ForwardingDrafter):
    """A drafter that records the logits it learns from, in `said`."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.said = CachedLogits()

    def learn_prompt(self, tokens: Sequence[int], start: int, entries: Ints) -> None:
        """See `Drafter`."""
        self.said.put(start, entries)
        super().learn_prompt(tokens, start, entries)

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:
        """See `Drafter`."""
        emitted = len(verdict.tokens)
        if readout.entries is not None and self.learns_prompts:
            self.said.put(len(context) - emitted - 1, readout.entries[verdict.path[:emitted]])
        super().learn(context, draft, readout, verdict)


@dataclass(frozen=True)
class CachedText:
    """A text in the prefix cache."""

    scope: Scope
    tokens: Tokens  # ids, [L]
    cache: TreeCache
    said: CachedLogits
    client: str | None = None  # whose request left the text

    @property
    def nbytes(self) -> int:
        """Memory of the text in bytes."""
        return len(self.tokens) * self.cache.token_bytes + self.tokens.nbytes + self.said.nbytes


class PrefixCache:
    """Cached texts within a memory budget.

    The least recently used text of the client with most bytes is evicted first. Otherwise a client that sends many
    texts, under any number of scopes, would evict all others'.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._texts: list[CachedText] = []  # least recently used first

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, scope: Scope, tokens: Sequence[int]) -> tuple[CachedText, int] | None:
        """Return the text of a scope with the longest common prefix, and its length; None below `MIN_PREFIX`."""
        length, index = self._longest(scope, tokens)
        if length < MIN_PREFIX:
            return None
        text = self._texts.pop(index)
        self._texts.append(text)
        return text, length

    def knows(self, scope: Scope, tokens: Sequence[int]) -> bool:
        """Return True if `find` would return a text, which does not count as use of it."""
        return self._longest(scope, tokens)[0] >= MIN_PREFIX

    def _longest(self, scope: Scope, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the length of the longest common prefix with a cached text, and the text's index."""
        wanted = np.asarray(tokens, dtype=np.int64)
        return max(((common(text.tokens, wanted), index) for index, text in self._in_scope(scope)), default=(0, 0))

    def lacks(self, scope: Scope, tokens: Sequence[int]) -> bool:
        """Return True if no cached text begins with these tokens and they are long enough to be cached."""
        return len(tokens) >= MIN_PREFIX and self._longest(scope, tokens)[0] < len(tokens)

    def put(self, text: CachedText) -> None:
        """Add a text, replacing texts that are prefixes of it. A text larger than the cache is not added."""
        if text.nbytes > self.max_bytes:
            return
        for index, other in reversed(list(self._in_scope(text.scope))):
            if common(other.tokens, text.tokens) == len(other.tokens):
                self._drop(index)
        while self.nbytes + text.nbytes > self.max_bytes:
            self._drop(self._victim(text))
        self._texts.append(text)
        self.nbytes += text.nbytes

    def _victim(self, coming: CachedText) -> int:
        """Return the index of the text to evict; `coming` counts towards its client already."""
        taken = Counter({coming.client: coming.nbytes})
        for text in self._texts:
            taken[text.client] += text.nbytes
        clients = {text.client for text in self._texts}
        largest = max(clients, key=taken.__getitem__)
        return next(index for index, text in enumerate(self._texts) if text.client == largest)

    def clear(self) -> None:
        """Remove all texts."""
        self._texts.clear()
        self.nbytes = 0

    def _in_scope(self, scope: Scope) -> list[tuple[int, CachedText]]:
        return [(index, text) for index, text in enumerate(self._texts) if text.scope == scope]

    def _drop(self, index: int) -> None:
        self.nbytes -= self._texts.pop(index).nbytes


def common(one: Tokens, other: Tokens) -> int:
    """Return the length of the common prefix of two texts."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def state_of(model: nn.Module) -> Hashable:
    """Return what keys and values depend on besides the tokens: weights, and the adapters in use.

    Weights that are assigned, loaded or written to have another address or version; the values of some of them tell of
    writes that torch does not count. It takes some microseconds per weight.
    """
    tensors, adapters = list[torch.Tensor](), list[Hashable]()
    for module in model.modules():
        tensors += [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]
        if hasattr(module, "merged_adapters"):  # a layer of PEFT
            layer: Any = module
            scaling = tuple(getattr(layer, "scaling", {}).items())
            adapters.append(
                (tuple(layer.active_adapters), layer.disable_adapters, tuple(layer.merged_adapters), scaling)
            )
    # Of weights that are split over processes, this one's share.
    own = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    plain = [each for each in own if each.layout is torch.strided and each.device.type != "meta" and each.numel()]
    some = plain[:: max(1, len(plain) // SAMPLED_WEIGHTS)]
    values = [each.detach().reshape(-1)[each.numel() // 2].item() for each in some]
    versions = [(id(each), 0 if each.is_inference() else each._version) for each in tensors]
    return tuple(versions), tuple(each.data_ptr() for each in plain), tuple(values), tuple(adapters)


class PrefixReuse:
    """Reads and writes the prefix cache for the requests of a batch; a budget of 0 bytes disables it."""

    def __init__(self, max_bytes: int, most_tokens: int, model: nn.Module) -> None:
        self.prefix_cache, self._model = PrefixCache(max_bytes), model
        self._most = most_tokens  # of a shared prefix, see `TextPieces.shareable`

    def scope_of(self, active: ActiveRequest) -> Scope:
        """Return who may reuse a request's text, with the state of the model now."""
        return active.request.scope, state_of(self._model) if self.prefix_cache.max_bytes else None

    def drafter(self, drafter: Drafter) -> Drafter:
        """Wrap a drafter so that the logits it learns from are recorded for later requests."""
        return RecordingDrafter(drafter) if self.prefix_cache.max_bytes else drafter

    def take(self, active: ActiveRequest) -> None:
        """Copy the cached prefix of an unfed text into its request's cache; the last token is always fed."""
        row, text = active.row, active.text
        if row is None or not self._serves(active) or active.prompt_logprobs is not None:
            return
        found = None
        with self._optional():
            found = self.prefix_cache.find(active.scope, text)
        if found is None:
            return
        known, tokens = found[0], min(found[1], len(text) - 1, self._most)
        active.cache, active.fed = known.cache.copy_row(0, tokens), tokens
        if row.written:  # the drafter knows the text already
            return
        active.handle.cached_tokens = tokens
        if row.drafter.learns_prompts:
            for start, entries in known.said.runs(tokens):
                row.drafter.learn_prompt(row.tokens, start, entries)

    def knows(self, active: ActiveRequest) -> bool:
        """Return True if a cached prefix of an unfed text exists."""
        return self._serves(active) and self.prefix_cache.knows(self.scope_of(active), active.text)

    def will_have_prefix(self, active: ActiveRequest, other: ActiveRequest) -> bool:
        """Return True if `active` will have a cached prefix once `other`, which has none, has been fed."""
        if not self._serves(active) or active.request.scope != other.request.scope or len(other.text) < 2 * MIN_PREFIX:
            return False
        return common(np.array(active.text), np.array(other.text)) >= MIN_PREFIX

    def put_prompt(self, active: ActiveRequest) -> None:
        """Cache a prompt that has just been fed, if much of it is new: waiting requests may begin like it."""
        if active.row is not None and active.fed - active.handle.cached_tokens >= 2 * MIN_PREFIX:
            self.put(active, active.row, active.fed, active.cache.copy_row)

    def put(
        self, active: ActiveRequest, row: Row, tokens: int, copy_row: Callable[[int, int], TreeCache], place: int = 0
    ) -> None:
        """Cache the first tokens of a row's text; `copy_row` copies so many of the row at an index, `place`."""
        tokens = min(tokens, self._most)
        text, scope = row.tokens[:tokens], active.scope
        if not self._serves(active) or not self.prefix_cache.lacks(scope, text) or self.scope_of(active) != scope:
            return
        said = row.drafter.said.first(tokens) if isinstance(row.drafter, RecordingDrafter) else CachedLogits()
        with self._optional():
            ids, client = np.array(text, dtype=np.int64), active.request.client
            self.prefix_cache.put(CachedText(scope, ids, copy_row(place, tokens), said, client))

    @contextmanager
    def _optional(self) -> Iterator[None]:
        """Drop the cache if the block fails, mostly for lack of memory: requests do without."""
        try:
            yield
        except Exception as problem:  # noqa: BLE001 - logged
            logger.warning("prefix cache dropped: %s: %s", type(problem).__name__, problem)
            self.prefix_cache.clear()

    def _serves(self, active: ActiveRequest) -> bool:
        """Return True if a request's text can be shared; images do not show in its ids."""
        return bool(self.prefix_cache.max_bytes) and self._most >= MIN_PREFIX and not active.pinned


def prefill_group(
    queue: Sequence[ActiveRequest], max_tokens: int, runner: EagerRunner, reuse: PrefixReuse
) -> list[ActiveRequest]:
    """Return the requests at the head of a queue to be prefilled together, whole.

    A request is prefilled alone if its prefill has begun, if it has images or prompt logprobs, or if a prefix of it is
    cached, or will be once those before it have been fed.
    """
    group: list[ActiveRequest] = []
    for active in queue if runner.pads else ():
        begun = active.row is not None or active.pinned or active.prompt_logprobs is not None
        if begun or reuse.knows(active) or any(reuse.will_have_prefix(active, other) for other in group):
            break
        if runner.padded([len(each.text) for each in (*group, active)]) > max_tokens:
            break
        group.append(active)
    return group
