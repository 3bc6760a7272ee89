"""The composition of one generation: runner, step cost, tree budget, drafters, output.

A generation of one row or several (`Session`), a batch in lock-step and an engine all decode through a `DecodeJob`, so
that everything learned about a model, its passes and its texts is shared by all of them.

    runner      makes the forward passes: eager or captured, in one process or several, behind an encoder
    cost        seconds of a pass by its size: the curve of this model on this machine, refreshed by every step
    budget      one size for the trees of all rows; None where each row chooses its own
    drafters    one per row, from its `DraftSpec`
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from lade.announcements import announce_once, contention_now
from lade.config import LookaheadConfig
from lade.decoding.drafting.adaptive import drafter_for, reads_logits
from lade.decoding.drafting.controller import Controller, ControllerState, max_tree_size
from lade.decoding.drafting.copy_drafting import OwnText, Prediction
from lade.decoding.drafting.drafter import Constraint, Drafter, Source
from lade.decoding.drafting.memory import ContextMemory
from lade.decoding.drafting.step_cost import StepCost
from lade.decoding.mtp import FIXED_PASSES, MOST_PASSES, BatchDrafter, MtpPasses
from lade.errors import ConfigError, InputError, UnsupportedArgumentError
from lade.grammar import GRAMMARS
from lade.hf.processors import Record
from lade.model.facts import ModelFacts, as_cache
from lade.model.inputs import MaskPlan, batch_bucket
from lade.model.kv_cache import TreeCache
from lade.model.prepared import USER_CACHES, Prepared, placeholder_ids, refuse, special_ids
from lade.model.runner import ENCODED_RUNNERS, MTP_LAYERS, EagerRunner, runner_for
from lade.model.supports import mtp_search_refusal
from lade.stats import Stats, Surroundings
from lade.tuning.cost_cache import save_refreshed, step_cost_for
from lade.version import note_untested_version

logger = logging.getLogger(__name__)

Output = torch.Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput


def text_kind(prepared: Prepared, config: LookaheadConfig, *, constrained: bool) -> str:
    """Return a label for the kind of text that a call generates, such as "sampled at 0.7, with a memory"."""
    generation_config = prepared.generation_config
    kind = f"sampled at {generation_config.temperature or 1.0:.1f}" if generation_config.do_sample else "greedy"
    if constrained:
        kind += ", by a grammar"
    if prepared.predictions:
        kind += ", predicted"
    return kind if config.memory is None else f"{kind}, with a memory"


def output_of(prepared: Prepared, written: list[list[int]], record: Record, cache: Cache | None = None) -> Output:
    """Return the result of `model.generate`, given the new tokens of each row, and the cache for an output object."""
    prompts, config = prepared.input_ids, prepared.generation_config
    longest = max(map(len, written))
    pad: Any = config._pad_token_tensor  # EOS if there is no pad_token_id
    pad = None if pad is None else int(pad)
    new = [tokens + [pad] * (longest - len(tokens)) for tokens in written]
    ids = torch.cat([prompts, prompts.new_tensor(new)], dim=1)
    if not config.return_dict_in_generate:
        return ids
    fields: dict[str, Any] = {"sequences": ids, "scores": record.scores, "logits": record.logits}
    if prepared.facts.has_encoder:
        pair = cache.dynamic_pair() if isinstance(cache, TreeCache) else None
        return GenerateEncoderDecoderOutput(**fields, **as_cache(pair))
    return GenerateDecoderOnlyOutput(**fields, **as_cache(USER_CACHES.load().output_cache(prepared, ids, cache)))


def record_for(generation_config: GenerationConfig, top: int | None = None) -> Record:
    """Return an empty record of the requested outputs; see `Record` for `top`."""
    wanted = generation_config.return_dict_in_generate
    return Record(
        scores=() if wanted and generation_config.output_scores else None,
        logits=() if wanted and generation_config.output_logits else None,
        top=top,
    )


@dataclass(frozen=True)
class DraftSpec:
    """Specification of one row's drafter; checked before anything is fed.

    Attributes:
        config: the method and its sizes.
        memory: memory shared by the rows of one call; None for the config's own, or a new one.
        excluded: ids after which nothing is drafted: EOS, padding, placeholders of media inputs.
        vocabulary: V; ids below it can be fed.
        source_text: ids of the encoder's input, drafted from as if they preceded the prompt.
        prediction: ids of the expected answer; None without one.
        constraint: tokens that a grammar forces and forbids; None without one.
        kind: kind of text, see `text_kind`.
    """

    config: LookaheadConfig
    memory: ContextMemory | None
    excluded: Collection[int]
    vocabulary: int
    source_text: Sequence[int]
    prediction: Sequence[int] | None
    constraint: Constraint | None
    kind: str

    @classmethod
    def of_rows(cls, prepared: Prepared, config: LookaheadConfig, prompts: Sequence[list[int]]) -> list[DraftSpec]:
        """Return one specification per row, given the tokens of each row's prompt, without padding.

        Raises:
            InputError: the number of predictions differs from that of prompts, or they have ids outside the vocabulary.
            UnsupportedArgumentError: there is a prediction, but the method drafts from no text.
        """
        rows = len(prompts)
        excluded = special_ids(prepared.generation_config) | placeholder_ids(prepared.model)
        vocabulary, texts = prepared.vocabulary, [prepared.source_text(row) for row in range(rows)]
        shares = rows > 1 and config.method.lacks_memory
        memory = ContextMemory() if shares else None  # the rows of one call may learn from each other
        predictions = _predictions_by_row(prepared, config, rows) if prepared.predictions else [None] * rows
        grammars = GRAMMARS.loaded() if prepared.logits_processor else None
        constraints = [None] * rows if grammars is None else grammars.constraints_for(prepared, prompts)
        kind = text_kind(prepared, config, constrained=constraints[0] is not None)
        return [
            cls(config, memory, excluded, vocabulary, text, prediction, constraint, kind)
            for text, prediction, constraint in zip(texts, predictions, constraints, strict=True)
        ]


def _predictions_by_row(prepared: Prepared, config: LookaheadConfig, rows: int) -> Sequence[Sequence[int] | None]:
    """Return the prediction of each row, `[B]`; see `DraftSpec.of_rows` for the errors raised."""
    texts, repeated = prepared.predictions, prepared.generation_config.num_return_sequences or 1
    if config.only:
        refuse("prediction with only=True", "the sources draft alone then")
    if not config.guesses:
        refuse("prediction with guesses=0", "nothing but the window is drafted then")
    if len(texts) * repeated != rows:
        raise InputError(
            f"prediction has {len(texts)} texts for {rows // repeated} prompts: give one per prompt, which may be empty"
        )
    vocabulary = prepared.vocabulary
    for token in (token for text in texts for token in text):
        if not 0 <= token < vocabulary:
            raise InputError(f"prediction has the id {token}, and the model has a vocabulary of {vocabulary}")
    return [text for text in texts for _ in range(repeated)]


class DecodeJob:
    """Components that decode the rows of one model.

    Args:
        model: a model that `lade.supports`.
        runner: runner of its passes, see `runner_of`.
        rows: B, the initial number of rows.
        most: maximum number of tokens that a row feeds in a step; None for the runner's limit.
        without_mtp: reason why the loop makes no passes of MTP layers; empty if it does.
        engine: whether rows come and go. They share one tree size, which goes by what texts of their kind have yielded,
            or texts of several kinds while these are decoded together.

    Attributes:
        budget: chooses one tree size for all rows, once a drafter needs it; None before that or without one.
        mtp: passes of the checkpoint's MTP layer, once a drafter needs them and if there is one.
        setup_s: seconds spent to measure passes, once on a machine, and not reported yet.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        runner: EagerRunner,
        *,
        rows: int = 1,
        most: int | None = None,
        without_mtp: str = "",
        engine: bool = False,
    ) -> None:
        self.runner = runner
        self.budget: Controller | None = None
        self.mtp = BatchDrafter()
        self._without_mtp = without_mtp
        self._model, self._rows, self._engine = model, rows, engine
        self._kind = "engine" if engine else ""  # of text: observations about one are not used for another
        self._most = max_tree_size(runner.parts) if most is None else most
        self._cost: StepCost | None = None
        self._learned: StepCost | None = None  # the one that knows what texts have yielded
        self._state: ControllerState | None = None
        self.setup_s = 0.0

    def drafters(self, specs: Sequence[DraftSpec], *, alone: bool = False) -> list[Drafter]:
        """Return one drafter per row; the step cost is looked up or measured if they need it for the first time.

        A row that is `alone` in its batch for now learns from its prompt regardless.
        """
        if self._cost is None and any(spec.config.method.sizes_trees for spec in specs):
            start = perf_counter()
            self._cost = self._learned = step_cost_for(self._model, self.runner, batch=self._rows)
            self.setup_s += perf_counter() - start
        self._go_by_kind({spec.kind for spec in specs}, alone=alone)
        if self.budget is not None:
            self.budget.begin_texts(len(specs), alone=alone)
        self._begin_mtp([spec.config for spec in specs])
        return [self._drafter(spec, alone=alone) for spec in specs]

    def report_to(self, stats: Stats, config: LookaheadConfig) -> None:
        """Add the setup time, which is reported once, and the circumstances of a generation to its figures."""
        pass_s = {} if self._cost is None else {size: self._cost.seconds(size) for size in (1, 8)}
        note = contention_now(torch.get_num_threads()) if self._model.device.type == "cpu" else ""
        if note:
            announce_once(logger, note)
        stats.setup_s += self.setup_s
        self.setup_s = 0.0
        stats.surroundings = Surroundings(pass_s, config.memory is not None, note)

    def adopt(self, drafter: Drafter) -> Drafter:
        """Use a caller's own drafter for the only row; an MTP layer predicts for it if it takes predictions."""
        if drafter.mtp is not None:
            self.mtp = _mtp_passes(self.runner, [LookaheadConfig(budget=1, mtp=True)], self._kind)
            self.mtp.fixed = MOST_PASSES
        return drafter

    def _begin_mtp(self, configs: Sequence[LookaheadConfig]) -> None:
        """Load the model's MTP layer, if a row may draft with it."""
        if self._without_mtp:
            _refuse_mtp(configs, self._without_mtp)
        elif self.mtp.weights is None:
            self.mtp = _mtp_passes(self.runner, configs, self._kind)
        if self._cost is not None:
            self.mtp.fixed = None  # passes are chosen by their cost, as tree sizes are

    def _go_by_kind(self, kinds: set[str], *, alone: bool) -> None:
        """Go by what texts of these kinds, and of those that are decoded beside them, have yielded."""
        if self._engine:
            kinds = {f"engine, {kind}" for kind in kinds} | (set() if alone or self._state is None else {self._kind})
        self._kind = kinds.pop() if len(kinds) == 1 else "several kinds"
        if self._cost is None or self._learned is None:
            return
        self._state = self._learned.state(self._kind)
        if self.budget is not None:
            self.budget.go_by(self._state)
        else:
            self.budget = Controller(self._cost, self._state, self._most)

    def _drafter(self, spec: DraftSpec, *, alone: bool) -> Drafter:
        config = spec.config if spec.memory is None else replace(spec.config, memory=spec.memory)
        own: list[Any] = []
        if config.sources:  # random numbers of the caller's drafters are apart from those that choose tokens
            apart = None if self._engine else _user_module().DrawsApart()
            own = _user_module().sources_of(spec.config, spec.vocabulary, spec.excluded, self._most, apart=apart)
        if config.only:
            drafter: Drafter = _user_module().LoneSources(own, self._most, spec.constraint)
        else:
            drafter = drafter_for(
                config,
                spec.excluded,
                vocabulary=spec.vocabulary,
                budget=self.budget,
                sources=[*self._sources(spec), *own],
                constraint=spec.constraint,
                read_logits=alone or reads_logits(spec.config, self.budget),
                mtp=self.mtp.weights if config.method.wants_mtp else None,
            )
        return _user_module().SourcedDrafter(drafter, own, len(spec.source_text)) if own else drafter

    def _sources(self, spec: DraftSpec) -> list[Source]:
        """Return the sources of drafts from text: the prediction, and the row's own text."""
        sources = list[Source]()
        if spec.prediction is not None:
            sources.append(Prediction(spec.prediction, spec.excluded))
        if spec.config.method.copies_text:
            sources.append(OwnText(spec.source_text, spec.excluded))
        return sources

    def resize(self, rows: int) -> None:
        """Set the number of rows, 0 when all have ended."""
        if self.budget is None or rows in (0, self._rows):
            return
        if batch_bucket(rows) != batch_bucket(self._rows):
            self._cost = step_cost_for(self._model, self.runner, batch=rows)
            self.budget.use(self._cost)
        self._rows = rows

    def save(self) -> None:
        """Save the step costs that have changed, at the end of a generation."""
        save_refreshed(self._model)


def _user_module() -> Any:
    """Return the module for callers' own drafters, which few calls need."""
    return import_module("lade.decoding.drafting.user_sources")


def runner_of(prepared: Prepared, plan: MaskPlan, *, lock_step: bool = False) -> EagerRunner:
    """Return the runner of one call, behind an encoder if the model has one.

    With `lock_step`, transformers' own loop decodes and needs the logits of every pass, so that none is captured.
    """
    note_untested_version(transformers.__version__)
    if prepared.facts.has_encoder:
        return ENCODED_RUNNERS.load().runner_on_encoded(prepared, plan)
    own_cache, config = prepared.user_cache is None, prepared.generation_config
    return runner_for(prepared.facts, plan, config, own_cache=own_cache, captures=not lock_step)


def engine_runner(model: PreTrainedModel, plan: MaskPlan) -> EagerRunner:
    """Return the runner for all requests of an engine."""
    note_untested_version(transformers.__version__)
    return runner_for(ModelFacts.of(model), plan, GenerationConfig())


def _refuse_mtp(configs: Sequence[LookaheadConfig], reason: str) -> None:
    """Raise `UnsupportedArgumentError` if a config requires MTP layers."""
    if any(config.mtp for config in configs):
        raise UnsupportedArgumentError(f"mtp=True cannot be used: {reason}", "leave it out: the memory drafts alone")


def with_use_mtp(generation_config: GenerationConfig, config: LookaheadConfig) -> LookaheadConfig:
    """Translate transformers' `use_mtp=True` to `mtp=True`; raise `ConfigError` if the config excludes MTP layers.

    `use_mtp` of the prepared config, a copy for this call, is reset: transformers' own MTP loop draws samples
    differently from plain decoding.
    """
    if not getattr(generation_config, "use_mtp", None):
        return config
    if config.mtp is False:
        raise ConfigError("mtp", False, "use_mtp=True asks for the model's MTP layers: leave out one of the two")
    generation_config.use_mtp = None
    return replace(config, mtp=True)


def _mtp_passes(runner: EagerRunner, configs: Sequence[LookaheadConfig], kind: str) -> BatchDrafter:
    """Return the passes of a model's MTP layer for the rows of one batch, none without a layer that none requires."""
    # Without sizes that go by the cost of passes nothing tells whether the layer pays: then it has to be asked for.
    wanting = [config for config in configs if config.method.wants_mtp]
    if not wanting:
        return BatchDrafter()
    if runner.exposes_states:
        found = mtp_search_refusal(runner.facts) or MTP_LAYERS.load().layer_for(runner, kind)
    else:
        found = f"passes of a {type(runner).__name__} do not expose the hidden states that MTP layers need"
    if isinstance(found, str):
        _refuse_mtp(wanting, found)
        return BatchDrafter()
    fixed = FIXED_PASSES if all(config.budget is not None for config in wanting) else None
    return MtpPasses(*found, runner.clock, fixed)
