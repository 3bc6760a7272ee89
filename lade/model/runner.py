"""Run an unmodified transformers model: prefill, and one forward pass over a token tree per step."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Self

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from lade.clock import Clock, Duration, Stopwatch, ThreadClock, WallClock
from lade.decoding.loop import PromptLogitsHook, Reader
from lade.decoding.tree import ROOT, TokenTree
from lade.model.cache_layers import Recurrence
from lade.model.capture_blockers import PassMode, ordinary
from lade.model.facts import ModelFacts
from lade.model.inputs import RootInputs
from lade.model.kv_cache import BufferSizes, RowCache, TreeCache
from lade.model.masks import Inputs, MaskPlan
from lade.model.prefill import PASS_TOKENS, PreparedPrompts, PromptPasses, TextPieces, grouped
from lade.model.prompt_logits import HiddenStates
from lade.model.slot_patches import SlotPatches
from lade.model.user_cache import borrow


class FrequencySwitch:
    """What transformers does at the switch of one model.

    Args:
        model: its `prepare_inputs_for_generation` is asked.
        length: tokens beyond which other frequencies are used; None where they never change.
        device: where ids are fed in.
    """

    def __init__(self, model: Any, length: int | None, device: torch.device) -> None:
        self._model, self._length, self._device = model, length, device

    def recomputes(self, rows: Sequence[Sequence[int]], cache: TreeCache) -> bool:
        """Whether plain decoding drops the cache here and computes the text with new frequencies."""
        if self._length is None or not cache.get_seq_length():
            return False
        return self._prepared(torch.tensor(rows, device=self._device), cache).get("past_key_values") is None

    def drops_cache_wrongly(self) -> bool:
        """Whether plain decoding drops the cache at the switch and feeds the last token only, as if it were the text.

        Transformers up to 5.19 does that with Phi3; later versions feed the whole text again.
        """
        if self._length is None:
            return False
        ids = torch.zeros(1, self._length + 1, dtype=torch.long, device=self._device)
        prepared = self._prepared(ids, TreeCache.of_length(self._length))
        return prepared.get("past_key_values") is None and prepared["input_ids"].shape != ids.shape

    def _prepared(self, ids: torch.Tensor, cache: TreeCache) -> dict[str, Any]:
        prepared: dict[str, Any] = self._model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=1,
            past_key_values=cache,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.arange(ids.shape[1], device=ids.device).expand_as(ids),
            use_cache=True,
        )
        return prepared


class EagerRunner:
    """One call of `model.forward` per step, whatever the number of tokens.

    Args:
        model: a decoder-only model that `lade.supports`.
        plan: how the model takes its masks.
        generation_config: transformers' prefill reads `prefill_chunk_size` from it.
        facts: of the model, where the call has looked at it already.

    Attributes:
        facts: of the model, from the beginning of the call, or of an engine's last request.
        pieces: into which texts may be cut.
    """

    sizing: BufferSizes = TreeCache
    """How large its caches make their buffers, as long as there is memory."""
    refeeds = False
    """Whether `extend` feeds nodes again that an earlier pass has fed."""
    processes = 1
    """How many make its passes together."""
    step_sizes: Sequence[int] = ()
    """Tokens a row that passes are padded to, ascending: what lies between costs as much. None where they are not."""

    def __init__(
        self,
        model: PreTrainedModel,
        plan: MaskPlan,
        generation_config: GenerationConfig,
        facts: ModelFacts | None = None,
    ) -> None:
        self.model: Any = model
        self.facts = facts = ModelFacts.of(model) if facts is None else facts
        self.plan, self.generation_config = plan, generation_config
        self.positions = facts.positions
        self.device, self._dtype = input_device(model), model.dtype
        self.switch = FrequencySwitch(model, self.positions.longrope_switch, self.device)
        self.clock: Clock = ThreadClock() if self.device.type == "cpu" else WallClock()
        self._stopwatch = Stopwatch(self.clock)
        self._slot_patches, self._recurrence = SlotPatches(facts), facts.recurrence
        self.pieces = TextPieces(self._recurrence, self._slot_patches)
        self.mode = PassMode(facts, plan)
        self._accepts, self._cache_name = facts.accepts, facts.cache_name or "past_key_values"
        self._prompt_passes = PromptPasses(facts, plan, generation_config, self.device)
        self._prompts: PreparedPrompts | None = None

    @property
    def pass_time(self) -> Duration:
        """What the last call of `forward` spent in the model; reading waits for the device to end it."""
        return self._stopwatch.taken

    @pass_time.setter
    def pass_time(self, taken: Duration) -> None:
        self._stopwatch.taken = taken

    @property
    def parts(self) -> int:
        """Into how many parts it cuts each tree, each of which a process of its own feeds."""
        return 1

    @property
    def reader(self) -> Reader[Any] | None:
        """See `DecodeLoop.reader`; None where `forward` returns the logits here."""
        return None

    def look_again(self) -> None:
        """Look at the model's modules again, which may have changed between two requests of an engine."""
        self.facts = ModelFacts.of(self.model)
        self.mode = PassMode(self.facts, self.plan)

    def room(self, cached: int) -> int | None:
        """How deep a tree may be whose root lies at position `cached`; None for no limit."""
        return self.positions.room(cached)

    def eager(self) -> EagerRunner:
        """A runner of the same model that captures nothing, and works on a `TreeCache`."""
        return self

    def for_prompts(self, prompts: PreparedPrompts | None) -> Self:
        """A runner of the same model whose prefill feeds these prompts as they were prepared; itself for None."""
        if prompts is None:
            return self
        runner = copy.copy(self)
        runner._prompts = prompts
        return runner

    def with_all_logits(self) -> Self:
        """A runner of the same model whose prefill, of one prompt of text, shows its hook the model's own logits."""
        runner = copy.copy(self)
        runner._prompt_passes = self._prompt_passes.with_all_logits()
        return runner

    def tree_cache(self) -> TreeCache:
        """An empty cache for passes that are not captured."""
        return TreeCache()

    def new_cache(self, *, tokens: int | None = None, limit: int | None = None) -> RowCache:
        """An empty cache of the kind that this runner works on.

        Args:
            tokens: greatest length that a row is going to have, if that is known.
            limit: slots of all rows together that buffers of earlier generations may have; None for no limit.
        """
        return TreeCache()

    def borrow(self, given: Cache, tokens: int, *, handed_out: bool) -> RowCache:
        """The cache to decode one generation with; `RowCache.give_back` ends it.

        Args:
            given: the user's cache, or an empty `TreeCache` of our own.
            tokens: greatest length that a row is going to have.
            handed_out: whether the caller gets `given` in the end.
        """
        return borrow(given)

    def host(self, cache: TreeCache, tokens: int) -> Any:
        """A cache that `forward` works on, with the rows of another one, which is not to be used any more.

        Args:
            cache: the other one.
            tokens: greatest length that a row is going to have.
        """
        return cache

    def pass_sizes(self, largest: int) -> Sequence[int]:
        """Sizes whose first pass takes longer than the later ones, among those of up to `largest` tokens a row."""
        return ()

    @property
    def pads(self) -> bool:
        """Whether prompts of several lengths are fed in one pass where that costs less than passes of their own."""
        return self._prompt_passes.pad and self.pieces.anywhere

    @property
    def pass_tokens(self) -> int:
        """What a prefill costs beside its tokens, in tokens."""
        return PASS_TOKENS.get(self.device.type, PASS_TOKENS["cuda"])

    def padded(self, lengths: Sequence[int]) -> int:
        """Tokens that a prefill of prompts of these lengths feeds, padding included."""
        prompts = Counter(lengths)
        return sum(max(group) * sum(prompts[length] for length in group) for group in self._groups(prompts))

    @torch.no_grad()
    def prefill(
        self, rows: Sequence[Sequence[int]], cache: TreeCache, hook: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """Feed what `cache` does not hold yet, as transformers does it (in chunks if configured), each prompt once.

        Prompts of several lengths are padded, behind their last token, where that saves more than it costs; others are
        fed into caches of their own, which are then joined. An empty cache is for rows of any length.

        Returns:
            Logits of each row's last token, `[B, V]`; the language model head runs on that token only.
        """
        if self._prompts is not None:
            return self._prefill_prepared(self._prompts, cache, hook)
        sharing: dict[tuple[int, ...], list[int]] = {}  # numbers of the rows that share each prompt
        for number, row in enumerate(rows):
            sharing.setdefault(tuple(row), []).append(number)
        groups = self._groups(Counter(map(len, sharing)))
        if len(sharing) == len(rows) and len(groups) == 1:
            return self._prefill(rows, list(sharing.values()), cache, hook)
        parts: list[TreeCache] = []
        places: list[tuple[int, int]] = [(0, 0)] * len(rows)
        logits: list[torch.Tensor] = [torch.empty(0)] * len(rows)
        for lengths in groups:
            prompts = [prompt for prompt in sharing if len(prompt) in lengths]
            parts.append(TreeCache())
            part_logits = self._prefill(prompts, [sharing[prompt] for prompt in prompts], parts[-1], hook)
            for place, prompt in enumerate(prompts):
                for number in sharing[prompt]:
                    places[number], logits[number] = (len(parts) - 1, place), part_logits[place]
        cache.join(parts, places)
        return torch.stack(logits)

    def _groups(self, prompts: Mapping[int, int]) -> list[set[int]]:
        """Which lengths are fed together, given the number of prompts of each."""
        if not self.pads or self.positions.changes_by(max(prompts)):
            return [{length} for length in sorted(prompts)]
        return grouped(prompts, self.pass_tokens)

    def _prefill_prepared(
        self, prompts: PreparedPrompts, cache: TreeCache, hook: PromptLogitsHook | None
    ) -> torch.Tensor:
        """Feed prompts that have more than text in them; each row is one of them. Logits `[B, V]`."""
        whole = not cache.get_seq_length()
        try:
            self._begin_prompt(cache)
            with HiddenStates(self.model) if hook and prompts.readable else nullcontext() as hidden:
                logits = prompts.feed(self.model, self.generation_config, cache)
            cache.settle()
        except BaseException:
            if whole:  # some layers hold tokens that others lack
                cache.reset()
            raise
        if hook and hidden:
            rows = [[row] for row in range(len(prompts.paddings))]
            hidden.tell(hook, logits, prompts.width, rows, prompts.paddings)
        return logits

    def _prefill(
        self,
        prompts: Sequence[Sequence[int]],
        sharing: Sequence[Sequence[int]],
        cache: TreeCache,
        hook: PromptLogitsHook | None,
    ) -> torch.Tensor:
        """Feed prompts in one pass; `sharing` are the numbers of the rows of each. Logits `[P, V]`."""
        cached = cache.get_seq_length()
        forgotten = self._recurrence is not None and self._recurrence.forgets and len(prompts[0]) - cached > 1
        whole = self.switch.recomputes(prompts, cache) or not cached or forgotten
        try:
            if whole:
                cache.reset()
            self._begin_prompt(cache)
            return self._prompt_passes.feed(prompts, sharing, cache, hook)
        except BaseException:
            if whole:  # some layers hold tokens that others lack, and none what they held before
                cache.reset()
            raise

    def _begin_prompt(self, cache: TreeCache) -> None:
        """Have recurrent layers take part in a prefill."""
        if self._recurrence is not None and not cache.layers:
            cache.layers += self._recurrence.layers()
        cache.begin()

    @torch.no_grad()
    def forward(self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: TreeCache) -> torch.Tensor:
        """Feed one tree a row.

        Args:
            trees: their roots are the last tokens of `rows`.
            rows: all tokens so far, the root included.
            cache: holds everything before the roots; the trees are appended to it.

        Returns:
            Logits of all nodes, `[B, S, V]`, S being the largest tree's size; in rows with a smaller tree the
            logits after its last node are undefined.
        """
        at_switch = len(rows) == 1 and cache.lengths[0] == self.positions.longrope_switch
        if at_switch and self.switch.recomputes(rows, cache):
            self._stopwatch.start(self.device)
            logits: torch.Tensor = self.prefill(rows, cache)[:, None]
            self._stopwatch.stop(logits.device)
            return logits
        inputs = self._inputs(trees, cache.lengths)
        arguments = self._arguments(inputs, cache, cache.offsets.on(self.device))
        with self._patched_for(inputs, trees, cache), self.mode(self._slot_patches, self._recurrence):
            self._stopwatch.start(self.device)
            logits = self.model(**arguments).logits
            self._stopwatch.stop(logits.device)
        cache.count(*inputs.ids.shape)
        return ordinary(logits)

    def _inputs(self, trees: Sequence[TokenTree], lengths: Sequence[int]) -> Inputs:
        """Tensors of a pass; roots alone are fed as plain decoding feeds them, unless patches need other inputs."""
        if max(map(len, trees)) == 1 and not self._slot_patches and not self.plan.compact:
            return RootInputs.of([tree.ids[ROOT] for tree in trees], lengths, self.device)
        return self.plan.inputs(trees, lengths, self.device)

    def _patched_for(
        self, inputs: Inputs, trees: Sequence[TokenTree], cache: TreeCache
    ) -> AbstractContextManager[object]:
        """Whatever the model needs to be patched for a pass; most models nothing."""
        if not self._slot_patches and self._recurrence is None:
            return nullcontext()
        with ExitStack() as stack:  # undone if one of them fails
            stack.enter_context(self._slot_patches.patched_for(inputs))
            if self._recurrence is not None:
                self._begin(self._recurrence, trees, cache, stack)
            return stack.pop_all()

    def _begin(self, recurrence: Recurrence, trees: Sequence[TokenTree], cache: TreeCache, stack: ExitStack) -> None:
        """Have recurrent layers take part in a pass; where it feeds roots alone, it is one of plain decoding."""
        if max(map(len, trees)) == 1:
            cache.begin()
            return
        ancestry = recurrence.ancestry(trees)
        cache.begin(ancestry)
        stack.enter_context(recurrence.patched_for(ancestry))

    @torch.no_grad()
    def extend(self, trees: Sequence[TokenTree], held: Sequence[int], cache: TreeCache) -> torch.Tensor:
        """Feed the nodes of one tree a row that the cache does not hold yet.

        Args:
            trees: their first nodes are cached already.
            held: `[B]`, number of these nodes.
            cache: its rows end with these nodes; the other ones are appended to it.

        Returns:
            Logits of the nodes fed, `[B, S, V]`, S being the largest number of them; in rows with fewer the logits
            after the last one are undefined.
        """
        inputs = self.plan.inputs(trees, cache.lengths, self.device, held)
        arguments = self._arguments(inputs, cache, cache.offsets.on(self.device))
        with self._slot_patches.patched_for(inputs), self.mode(self._slot_patches, self._recurrence):
            self._stopwatch.start(self.device)
            logits: torch.Tensor = self.model(**arguments).logits
            self._stopwatch.stop(logits.device)
        return ordinary(logits)

    def _arguments(self, inputs: Inputs, cache: Cache, offsets: torch.Tensor | None) -> dict[str, Any]:
        """The arguments of the model for one pass over trees; offsets `[axes, B, 1]` are added to their positions."""
        arguments: dict[str, Any] = {
            "input_ids": inputs.ids,
            "attention_mask": self.plan.masks(inputs, self._dtype),
            self._cache_name: cache,
            "use_cache": True,
            "return_dict": True,
        }
        if "position_ids" in self._accepts:
            arguments["position_ids"] = inputs.positions if offsets is None else inputs.positions + offsets
        return arguments


def input_device(model: PreTrainedModel) -> torch.device:
    """Where ids are fed in: with the embeddings, or where accelerate brings them if their weights lie elsewhere."""
    embeddings: Any = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    if device.type == "meta":
        device = torch.device(embeddings._hf_hook.execution_device)
    return device
