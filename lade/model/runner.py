"""Run an unmodified transformers model: prefill, and one forward pass over token trees per step.

The eager runner serves most models; a backend may bring a runner of its own, see `runner_for`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol, Self

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from lade.clock import Clock, Duration, Stopwatch, ThreadClock, WallClock
from lade.decoding.loop import PromptLogitsHook, Reader, Texts
from lade.decoding.mtp import MtpHabits, MtpLayer
from lade.decoding.tree import ROOT, TokenTree
from lade.model.capture_blockers import PassMode, ordinary
from lade.model.facts import CACHE, ModelFacts
from lade.model.inputs import Inputs, MaskPlan, RootInputs
from lade.model.kv_cache import BufferSizes, RowCache, TreeCache
from lade.model.module_changes import hooked
from lade.model.prefill import (
    PASS_TOKENS,
    FrequencySwitch,
    HiddenStates,
    PreparedPrompts,
    PromptPasses,
    TextPieces,
    grouped,
)
from lade.model.prepared import USER_CACHES, Prepared
from lade.model.registry import Role


class _PassPatches(Protocol):
    def __bool__(self) -> bool: ...
    def patched_for(self, inputs: Inputs) -> AbstractContextManager[None]: ...


@contextmanager
def _resetting(cache: TreeCache, *, after_error: bool) -> Iterator[None]:
    """Reset a cache after an error in a pass that fills it: some layers hold tokens that others lack."""
    try:
        yield
    except BaseException:
        if after_error:
            cache.reset()
        raise


class EagerRunner:
    """Calls `model.forward` once per step, whatever the number of tokens, of a decoder that `lade.supports`.

    Attributes:
        generation_config: the final config; transformers' prefill reads `prefill_chunk_size` from it.
        facts: facts about the model as of the start of the call, or of an engine's last request.
        prepared: whether the last pass did work that is done once: it was the first of its shape.
        shapes: rows and tokens per row of passes that have been made; it may be shared with later runners of the model.
        pieces: where texts may be split for prefill.
    """

    sizing: BufferSizes = TreeCache
    """Buffer sizes of its caches."""
    refeeds = False
    """True if `extend` feeds the held nodes again."""
    exposes_states = True
    """True if `watching_states` sees the hidden states of its passes."""
    processes = 1
    """Number of processes that make its passes together."""
    step_sizes: Sequence[int] = ()
    """Ascending sizes, in tokens per row, that passes are padded to; empty if they are not padded."""

    def __init__(
        self,
        model: PreTrainedModel,
        plan: MaskPlan,
        generation_config: GenerationConfig,
        facts: ModelFacts | None = None,
    ) -> None:
        self.model: Any = model
        self.plan, self.generation_config = plan, generation_config
        self.device, self._dtype = input_device(model), model.dtype
        self.clock: Clock = ThreadClock() if self.device.type == "cpu" else WallClock()
        self._stopwatch = Stopwatch(self.clock)
        self.prepared, self.shapes = False, set[tuple[int, int]]()
        self._prompts: PreparedPrompts | None = None
        self._go_by(ModelFacts.of(model) if facts is None else facts)

    def _go_by(self, facts: ModelFacts) -> None:
        """Set all that follows from a survey of the model."""
        self.facts = facts
        self._accepts, self._cache_name = facts.accepts, facts.cache_name or CACHE
        self._recurrence, self.positions = facts.recurrence, facts.positions
        self._slot_patches = SLOTS.load().patches(facts) if facts.uses_slots else None
        self.mode = PassMode(facts, self.plan)
        self.switch = FrequencySwitch(self.model, self.positions.longrope_switch, self.device)
        self.pieces = TextPieces(facts)
        self._prompt_passes = PromptPasses(facts, self.plan, self.generation_config, self.device)

    @property
    def pass_time(self) -> Duration:
        """Time spent in the model by the last call of `forward`; reading it waits for the device."""
        return self._stopwatch.taken

    @pass_time.setter
    def pass_time(self, taken: Duration) -> None:
        self._stopwatch.taken = taken

    @property
    def parts(self) -> int:
        """Number of parts that each tree is split into, each fed by a process of its own."""
        return 1

    @property
    def reader(self) -> Reader[Any] | None:
        """Reader of the logits, see `DecodeLoop.reader`; None if `forward` returns them in this process."""
        return None

    def refresh_facts(self) -> None:
        """Survey the model's modules again, as they may have changed between two requests of an engine."""
        self._go_by(ModelFacts.of(self.model))

    @contextmanager
    def watching_states(self, watcher: Callable[[torch.Tensor], None]) -> Iterator[None]:
        """Call `watcher` with the hidden states `[B, S, H]` after the final norm of this thread's passes over trees."""
        with hooked(self.model.get_decoder(), after=lambda output: watcher(output[0].detach())):
            yield

    def room(self, cached: int) -> int | None:
        """Return how deep a tree may be whose root is at position `cached`; None for no limit."""
        return self.positions.room(cached)

    def eager(self) -> EagerRunner:
        """Return a runner of the same model without captured passes, for a `TreeCache`."""
        return self

    def for_prompts(self, prompts: PreparedPrompts | None) -> Self:
        """Return a runner of the same model whose prefill feeds these prompts as prepared; itself for None."""
        if prompts is None:
            return self
        runner = copy.copy(self)
        runner._prompts = prompts
        return runner

    def with_all_logits(self) -> Self:
        """Return a runner of the same model whose prefill of one prompt gives its hook the model's own logits."""
        runner = copy.copy(self)
        runner._prompt_passes = copy.copy(self._prompt_passes)
        runner._prompt_passes.all_logits = True
        return runner

    def tree_cache(self) -> TreeCache:
        """Return an empty cache for eager passes."""
        return TreeCache()

    def new_cache(self, *, tokens: int | None = None, limit: int | None = None) -> RowCache:
        """Return an empty cache of the type that this runner needs, for rows of at most `tokens`; None if unknown.

        `limit` bounds the slots, over all rows, in buffers reused from earlier generations; None for no limit.
        """
        return TreeCache()

    def borrow(self, given: Cache, tokens: int, *, handed_out: bool) -> RowCache:
        """Return the cache for one generation with rows of at most `tokens`, which `RowCache.give_back` ends.

        Given is the user's cache, or an empty `TreeCache` of our own; `handed_out` if the caller gets it in the end.
        """
        if isinstance(given, TreeCache):
            return given
        return USER_CACHES.load().borrow(given)

    def host(self, cache: TreeCache, tokens: int) -> Any:
        """Return a cache of the type that `forward` needs with the rows of another, which must not be used afterwards.

        No row gets longer than `tokens`.
        """
        return cache

    def pass_sizes(self, largest: int) -> Sequence[int]:
        """Return the pass sizes of up to `largest` tokens per row whose first pass takes longer than later ones."""
        return ()

    @property
    def pads(self) -> bool:
        """True if prompts of several lengths are padded into one pass where that costs less than separate passes."""
        return self._prompt_passes.pads and self.pieces.anywhere

    @property
    def pass_tokens(self) -> int:
        """Fixed cost of a prefill pass, in tokens."""
        return PASS_TOKENS.get(self.device.type, PASS_TOKENS["cuda"])

    def padded(self, lengths: Sequence[int]) -> int:
        """Return how many tokens a prefill of prompts of these lengths feeds, padding included."""
        prompts = Counter(lengths)
        return sum(max(group) * sum(prompts[length] for length in group) for group in self._groups(prompts))

    @torch.no_grad()
    def prefill(self, rows: Texts, cache: TreeCache, hook: PromptLogitsHook | None = None) -> torch.Tensor:
        """Feed the tokens that are not cached yet, as transformers does (in chunks if configured), each prompt once.

        Prompts of several lengths are padded on the right where that saves more than it costs; others are fed into
        separate caches, which are then joined. With an empty cache rows may have any length.

        Returns:
            Logits of each row's last token, `[B, V]`; the language model head runs on that token only.
        """
        if self._prompts is not None:
            return self._prefill_prepared(self._prompts, cache, hook)
        if len(rows) == 1:
            return self._prefill(rows, [[0]], cache, hook)
        sharing: dict[tuple[int, ...], list[int]] = {}  # indices of the rows that share each prompt
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
        """Return the groups of lengths that are fed together, given the number of prompts of each length."""
        if not self.pads or self.positions.changes_by(max(prompts)):
            return [{length} for length in sorted(prompts)]
        return grouped(prompts, self.pass_tokens)

    def _prefill_prepared(
        self, prompts: PreparedPrompts, cache: TreeCache, hook: PromptLogitsHook | None
    ) -> torch.Tensor:
        """Feed prompts with media inputs, gaps or embeddings, one per row; return logits `[B, V]`."""
        with _resetting(cache, after_error=not cache.get_seq_length()):
            self._begin_prompt(cache)
            with HiddenStates(self.model).collecting() if hook and prompts.readable else nullcontext() as hidden:
                logits = prompts.feed(self.model, self.generation_config, cache)
            cache.settle()
        if hook and hidden:
            rows = [[row] for row in range(len(prompts.paddings))]
            hidden.report(hook, logits, prompts.width, rows, prompts.paddings)
        return logits

    def _prefill(
        self, prompts: Texts, sharing: Sequence[Sequence[int]], cache: TreeCache, hook: PromptLogitsHook | None
    ) -> torch.Tensor:
        """Feed prompts in one pass; `sharing` lists the rows of each prompt. Return logits `[P, V]`."""
        cached = cache.get_seq_length()
        forgotten = self._recurrence is not None and self._recurrence.forgets and len(prompts[0]) - cached > 1
        whole = self.switch.recomputes(prompts, cache) or not cached or forgotten
        with _resetting(cache, after_error=whole):
            if whole:
                cache.reset()
            self._begin_prompt(cache)
            return self._prompt_passes.feed(prompts, sharing, cache, hook)

    def _begin_prompt(self, cache: TreeCache) -> None:
        """Prepare the cache's recurrent layers for a prefill."""
        if self._recurrence is not None and not cache.layers:
            cache.layers += self._recurrence.layers()
        cache.begin()

    @torch.no_grad()
    def forward(self, trees: Sequence[TokenTree], rows: Texts, cache: TreeCache) -> torch.Tensor:
        """Feed one tree per row; return the logits of all nodes, `[B, S, V]`, S being the size of the largest tree.

        In rows with a smaller tree the logits after its last node are undefined.

        Args:
            trees: B trees, whose roots are the last tokens of `rows`.
            rows: all tokens so far, the root included.
            cache: a cache that holds everything before the roots; the trees are appended to it.
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
        self._note_shape(logits)
        cache.count(*inputs.ids.shape)
        return ordinary(logits)

    def _note_shape(self, logits: torch.Tensor) -> None:
        """Tell whether a pass with logits `[B, S, V]` was the first of its shape."""
        shape = logits.shape[0], logits.shape[1]
        self.prepared = shape not in self.shapes
        self.shapes.add(shape)

    def _inputs(self, trees: Sequence[TokenTree], lengths: Sequence[int]) -> Inputs:
        """Build the inputs of a pass; lone roots are fed as in plain decoding, unless patches need other inputs."""
        if max(map(len, trees)) == 1 and not self._slot_patches and not self.plan.compact:
            return RootInputs.of([tree.ids[ROOT] for tree in trees], lengths, self.device)
        return self.plan.inputs(trees, lengths, self.device)

    def _patched_for(
        self, inputs: Inputs, trees: Sequence[TokenTree], cache: TreeCache
    ) -> AbstractContextManager[object]:
        """Return the context with all patches that the model needs for a pass; most models need none."""
        if not self._slot_patches and self._recurrence is None:
            return nullcontext()
        with ExitStack() as stack:  # undone if one of them fails
            if self._slot_patches:
                stack.enter_context(self._slot_patches.patched_for(inputs))
            if self._recurrence is not None and max(map(len, trees)) == 1:
                cache.begin()  # a pass over lone roots is one of plain decoding
            elif self._recurrence is not None:
                ancestry = self._recurrence.ancestry(trees)
                cache.begin(ancestry)
                stack.enter_context(self._recurrence.patched_for(ancestry))
            return stack.pop_all()

    @torch.no_grad()
    def extend(self, trees: Sequence[TokenTree], held: Sequence[int], cache: TreeCache) -> torch.Tensor:
        """Feed the nodes of one tree per row that the cache does not hold yet; return their logits, as `forward` does.

        Args:
            trees: B trees, whose first nodes are cached already.
            held: `[B]`, number of these nodes.
            cache: a cache whose rows end with these nodes; the others are appended to it.
        """
        inputs = self.plan.inputs(trees, cache.lengths, self.device, held)
        arguments = self._arguments(inputs, cache, cache.offsets.on(self.device))
        patched = self._slot_patches.patched_for(inputs) if self._slot_patches else nullcontext()
        with patched, self.mode(self._slot_patches, self._recurrence):
            self._stopwatch.start(self.device)
            logits: torch.Tensor = self.model(**arguments).logits
            self._stopwatch.stop(logits.device)
        self._note_shape(logits)
        return ordinary(logits)

    def _arguments(self, inputs: Inputs, cache: Cache, offsets: torch.Tensor | None) -> dict[str, Any]:
        """Return the model's arguments for one pass over trees; offsets `[axes, B, 1]` are added to the positions."""
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
    """Return the device for input ids: that of the embeddings, or where accelerate moves them if offloaded."""
    embeddings: Any = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    if device.type == "meta":
        device = torch.device(embeddings._hf_hook.execution_device)
    return device


class _SlotLayers(Protocol):
    def patches(self, facts: ModelFacts) -> _PassPatches | None: ...
    def padding_matters_from(self, facts: ModelFacts) -> int | None: ...


class _EncodedRunners(Protocol):
    def runner_on_encoded(self, prepared: Prepared, plan: MaskPlan) -> EagerRunner: ...


class _MtpLayers(Protocol):
    def layer_for(self, runner: EagerRunner, kind: str) -> tuple[MtpLayer, MtpHabits] | str: ...


class _RunnerMaker(Protocol):
    def runner(
        self,
        facts: ModelFacts,
        plan: MaskPlan,
        generation_config: GenerationConfig,
        *,
        own_cache: bool,
        captures: bool,
    ) -> EagerRunner | None: ...


SLOTS: Role[_SlotLayers] = Role("layers that use slots")
ENCODED_RUNNERS: Role[_EncodedRunners] = Role("encoded runners")
MTP_LAYERS: Role[_MtpLayers] = Role("MTP layers")
TEAM_RUNNERS: Role[_RunnerMaker] = Role("passes of several processes")
CAPTURED_RUNNERS: Role[_RunnerMaker] = Role("captured passes")


def runner_for(
    facts: ModelFacts,
    plan: MaskPlan,
    generation_config: GenerationConfig,
    *,
    own_cache: bool = True,
    captures: bool = True,
) -> EagerRunner:
    """Return the runner for a model: that of several processes if there are any, else captured passes, else eager ones.

    The model is a decoder without an encoder; see `EagerRunner` for plan and config. `own_cache` is false if decoding
    continues a user's cache, which has no fixed addresses; `captures` if every pass has to be launched eagerly.

    Raises:
        UnsupportedArgumentError: the processes that decode the model cannot serve these passes.
    """
    makers = [TEAM_RUNNERS.loaded()]
    if captures and input_device(facts.model).type == "cuda":
        makers.append(CAPTURED_RUNNERS.load())
    for maker in filter(None, makers):
        runner = maker.runner(facts, plan, generation_config, own_cache=own_cache, captures=captures)
        if runner is not None:
            return runner
    return EagerRunner(facts.model, plan, generation_config, facts)
