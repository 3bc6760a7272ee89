"""Runs an unmodified transformers model: prefill, and one pass over a token tree per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from lade.decoding.loop import PromptLogitsHook
from lade.decoding.tree import TokenTree
from lade.model.kv_cache import TreeCache
from lade.model.masks import Inputs, Mask, MaskPlan
from lade.model.position_limits import Positions
from lade.model.prompt_logits import HiddenStates
from lade.model.row_cache import RowCache
from lade.model.signature import accepted
from lade.model.slot_patches import SlotCounters
from lade.model.stopwatch import Stopwatch


class EagerRunner:
    """One call of `model.forward` per step, whatever the number of tokens.

    Args:
        model: a decoder-only model that `lade.supports`.
        plan: how it takes its masks.
        generation_config: transformers' prefill reads `prefill_chunk_size` from it.
    """

    def __init__(self, model: PreTrainedModel, plan: MaskPlan, generation_config: GenerationConfig) -> None:
        self.model: Any = model
        self.plan, self.generation_config = plan, generation_config
        self.positions = Positions.of(model.config.get_text_config(decoder=True))
        self.device = input_device(model)
        self._stopwatch = Stopwatch()
        self._slot_counters = SlotCounters(model)
        self._accepts = accepted(model)

    @property
    def forward_s(self) -> float:
        """Seconds that the last call of `forward` spent in the model; asking waits for the device to end it."""
        return self._stopwatch.seconds

    @forward_s.setter
    def forward_s(self, seconds: float) -> None:
        self._stopwatch.seconds = seconds

    def room(self, cached: int) -> int | None:
        """How deep a tree may be whose root lies at position `cached`; None for no limit."""
        return self.positions.room(cached)

    def new_cache(self, *, tokens: int | None = None, limit: int | None = None) -> RowCache:
        """An empty cache of the kind that suits this runner.

        Args:
            tokens: greatest length that a row is going to have, if that is known.
            limit: slots in all that buffers from earlier generations may have; None for any number.
        """
        return TreeCache()

    @torch.no_grad()
    def prefill(
        self, rows: Sequence[Sequence[int]], cache: TreeCache, watch: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """Feed what `cache` does not hold yet, as transformers does it (in chunks if asked), but without padding.

        Rows of equal length are fed together, those that are alike once, into caches that are then joined.

        Returns:
            Logits of each row's last token, `[B, V]`; the language model head runs on that token only.
        """
        places: dict[tuple[int, ...], list[int]] = {}
        for number, row in enumerate(rows):
            places.setdefault(tuple(row), []).append(number)
        if len(places) == len(rows) and len(set(map(len, places))) == 1:
            return self._prefill(rows, list(places.values()), cache, watch)
        parts: list[TreeCache] = []
        found: list[tuple[int, int]] = [(0, 0)] * len(rows)
        logits: list[torch.Tensor] = [torch.empty(0)] * len(rows)
        for length in sorted(set(map(len, places))):
            texts = [text for text in places if len(text) == length]
            parts.append(TreeCache())
            said = self._prefill(texts, [places[text] for text in texts], parts[-1], watch)
            for place, text in enumerate(texts):
                for number in places[text]:
                    found[number], logits[number] = (len(parts) - 1, place), said[place]
        cache.join(parts, found)
        return torch.stack(logits)

    def _prefill(
        self,
        texts: Sequence[Sequence[int]],
        places: Sequence[Sequence[int]],
        cache: TreeCache,
        watch: PromptLogitsHook | None,
    ) -> torch.Tensor:
        """Feed texts of equal length; `places` are the rows that each of them is the text of."""
        whole = self._forgets(texts, cache) or not cache.get_seq_length()
        try:
            if whole:
                cache.reset()
            return self._feed_texts(texts, places, cache, watch)
        except BaseException:
            if whole:  # some layers hold what others lack, and none what they held before
                cache.reset()
            raise

    def _feed_texts(
        self,
        texts: Sequence[Sequence[int]],
        places: Sequence[Sequence[int]],
        cache: TreeCache,
        watch: PromptLogitsHook | None,
    ) -> torch.Tensor:
        ids = torch.tensor(texts, device=self.device)
        kwargs: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        if "position_ids" in self._accepts:
            kwargs["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        if "logits_to_keep" in self._accepts:
            kwargs["logits_to_keep"] = 1
        if cache.get_seq_length():
            kwargs["attention_mask"] = torch.ones_like(ids)  # its width tells transformers what is cached already
        with HiddenStates(self.model) if watch else nullcontext() as hidden:
            output = self.model._prefill(ids, self.generation_config, kwargs)
        logits: torch.Tensor = output.logits[:, -1]

        def show(start: int, said: torch.Tensor) -> None:
            for alike, text_said in zip(places, said, strict=True):
                assert watch is not None
                watch(alike, start, text_said)

        if watch and hidden:
            hidden.show(logits, ids.shape[1], show)
        return logits

    @torch.no_grad()
    def forward(self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: TreeCache) -> torch.Tensor:
        """Feed one tree a row.

        Args:
            trees: their roots are the last tokens of `rows`.
            rows: all tokens so far, the root included.
            cache: holds everything before the roots; the trees are appended to it.

        Returns:
            Logits of all nodes, `[B, S, V]`, S being the largest tree's size; in rows with a smaller tree the
            logits behind its last node mean nothing.
        """
        if len(rows) == 1 and cache.lengths[0] == self.positions.switch and self._forgets(rows, cache):
            return self._timed(lambda: self.prefill(rows, cache)[:, None])
        return self._feed(self.plan.inputs(trees, cache.lengths, self.device), cache)

    @torch.no_grad()
    def extend(self, trees: Sequence[TokenTree], held: Sequence[int], cache: TreeCache) -> torch.Tensor:
        """Feed the nodes of one tree a row that the cache does not hold yet.

        Args:
            trees: their first nodes are cached already.
            held: `[B]`, how many.
            cache: its rows end with these nodes; the other ones are appended to it.

        Returns:
            Logits of the nodes fed, `[B, S, V]`, S being the largest number of them; in rows with fewer the logits
            behind the last one mean nothing.
        """
        return self._feed(self.plan.inputs(trees, cache.lengths, self.device, held), cache)

    def _feed(self, inputs: Inputs, cache: TreeCache) -> torch.Tensor:
        masks = self.plan.masks(inputs, self.model.dtype)
        with self._slot_counters.told(inputs):
            return self._timed(lambda: self._call(inputs, masks, cache))

    def _call(self, inputs: Inputs, masks: Mask, cache: Cache) -> torch.Tensor:
        kwargs: dict[str, Any] = {"attention_mask": masks, "past_key_values": cache, "use_cache": True}
        if "position_ids" in self._accepts:
            kwargs["position_ids"] = inputs.positions
        logits: torch.Tensor = self.model(input_ids=inputs.ids, **kwargs, return_dict=True).logits
        return logits

    def _timed(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._stopwatch.start(self.device)
        logits = call()
        self._stopwatch.stop(logits.device)
        return logits

    def _forgets(self, rows: Sequence[Sequence[int]], cache: TreeCache) -> bool:
        """Whether plain decoding of this model would drop the cache here and compute the text with new frequencies."""
        if self.positions.switch is None or not cache.get_seq_length():
            return False
        return self._prepared(torch.tensor(rows, device=self.device), cache).get("past_key_values") is None

    def loses_text(self) -> bool:
        """Whether plain decoding would drop the cache at the switch and feed the last token only, as if it were all.

        Transformers up to 5.19 does that with Phi3; later versions feed the whole text anew.
        """
        if self.positions.switch is None:
            return False
        ids = torch.zeros(1, self.positions.switch + 1, dtype=torch.long, device=self.device)
        prepared = self._prepared(ids, TreeCache.of_length(self.positions.switch))
        return prepared.get("past_key_values") is None and prepared["input_ids"].shape != ids.shape

    def _prepared(self, ids: torch.Tensor, cache: TreeCache) -> dict[str, Any]:
        prepared: dict[str, Any] = self.model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=1,
            past_key_values=cache,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.arange(ids.shape[1], device=ids.device).expand_as(ids),
            use_cache=True,
        )
        return prepared


def input_device(model: PreTrainedModel) -> torch.device:
    """Where ids are fed in: with the embeddings, or where accelerate brings them if their weights lie elsewhere."""
    embeddings: Any = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    if device.type == "meta":
        device = torch.device(embeddings._hf_hook.execution_device)
    return device
