"""Requests of an engine: options, preparation by `model.generate`, output, and compilation of clients' grammars."""

from __future__ import annotations

import functools
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteriaList

from lade.config import Lookahead, LookaheadConfig, resolve
from lade.decoding.drafting.drafter import Drafter
from lade.decoding.row import Row
from lade.errors import ConfigError, InputError, UnsupportedArgumentError, whole_number
from lade.grammar import GRAMMARS, Grammar, GrammarError
from lade.hf import call
from lade.hf.detokenizer import AnswerText
from lade.hf.job import DraftSpec, Output, output_of, record_for
from lade.hf.processors import StopReason, row_for
from lade.hf.refusals import check, warn_of_precision
from lade.hf.sampling import LoneSampler
from lade.model.config import LEARNED_POSITIONS, Positions
from lade.model.facts import CACHE, with_present_cache_name
from lade.model.inputs import MaskPlan
from lade.model.prepared import Prepared, custom_generate_for, ids_of, vocabulary_of
from lade.model.runner import input_device
from lade.model.supports import unwrap
from lade.serving.capacity import Need, largest_tree
from lade.serving.handle import PromptLogprobs
from lade.stats import Stats, Step

if TYPE_CHECKING:
    from lade.backends.grammar.compiled import GrammarBudget, Vocabulary

PLAIN = LookaheadConfig(window=0, ngram=2, guesses=0)  # the empty tree: one token per step
_SEEDS = 2**64


@dataclass(frozen=True)
class RequestOptions:
    """Per-request options that `model.generate` lacks, by the names that `Engine.add` has for them."""

    lookahead: Lookahead = None
    seed: int | None = None
    prediction: call.Prediction | None = None
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_texts: Sequence[str] | None = None
    tokenizer: Any = None
    skip_special_tokens: bool = True
    scope: str | None = None
    client: str | None = None
    on_step: Callable[[Step], None] | None = None
    stats: Stats | None = None

    def __post_init__(self) -> None:
        call.refuse_unused_prediction(self.prediction, resolve(self.lookahead)[0])
        call.check_stats(self.stats)
        if self.on_step is not None and not callable(self.on_step):
            raise ConfigError("on_step", self.on_step, "give a function that takes a Step, or None")
        seed, stops = self.seed, self.stop_texts
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _SEEDS):
            raise ConfigError("seed", seed, "give a whole number from 0 to 2**64 - 1, or None to have one drawn")
        for name, top in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if top is not None:
                whole_number(name, top, 0, note=", or None for none")
        for name, given in (("scope", self.scope), ("client", self.client)):
            if given is not None and not isinstance(given, str):
                raise ConfigError(name, given, "give a text that names whose request it is, or None")
        if stops is None:
            return
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ConfigError("stop_texts", stops, "give a list of texts, none of them empty; [] to get the text")
        if not callable(getattr(self.tokenizer, "decode", None)):
            raise ConfigError("tokenizer", self.tokenizer, "give the model's tokenizer, which stop_texts needs")

    @property
    def config(self) -> LookaheadConfig:
        """Method and sizes; `PLAIN` without lookahead."""
        return resolve(self.lookahead)[0] or PLAIN

    def text(self, prompt: Sequence[int]) -> AnswerText | None:
        """Return the detokenizer of an answer; None if its text is not needed."""
        if self.stop_texts is None:
            return None
        return AnswerText(self.tokenizer, prompt, self.stop_texts, skip_special_tokens=self.skip_special_tokens)


REMEDY = "leave it out, or use lade.generate"
_DRAWN_SEEDS = 2**32
_REFUSED = {
    "streamer": "give on_step, or iterate over the handle",
    CACHE: "rows of an engine share one cache",
}


class EngineRequest:
    """A prepared prompt, its options and its output."""

    def __init__(
        self, prepared: Prepared, *, options: RequestOptions, text: AnswerText | None, plan: MaskPlan | None
    ) -> None:
        generation_config, self.config = prepared.generation_config, options.config
        _, texts, self.images = check(prepared, plan=plan)  # images, until they are prefilled
        if len(texts) > 1:
            refuse(f"num_return_sequences={generation_config.num_return_sequences}", "add a request for each of them")
        self._prepared = replace(prepared, model_kwargs={})  # drop the images, which take memory
        self.ids = texts.ids[0]  # without padding
        self.need = Need(generation_config.max_length - texts.hidden[0], largest_tree(self.config))
        self.prompt_tokens = len(self.ids)
        _check_positions(prepared.model, self.need.tokens)
        if generation_config.prefill_chunk_size is not None and (prepared.facts.recurrent or prepared.facts.indexers):
            why = "it feeds prompts in pieces of its own, and what this model writes depends on where a piece begins"
            refuse(f"prefill_chunk_size={generation_config.prefill_chunk_size}", why)
        self.stats, self.on_step = Stats() if options.stats is None else options.stats, options.on_step
        self.text, self.scope, self.seed = text, options.scope, None
        self.client = options.scope if options.client is None else options.client
        if generation_config.do_sample:
            self.seed = secrets.randbelow(_DRAWN_SEEDS) if options.seed is None else options.seed
        self.draft_spec = DraftSpec.of_rows(prepared, self.config, texts.ids)[0]
        self._record = record_for(generation_config, options.logprobs)
        self.prompt_logprobs = None
        if options.prompt_logprobs is not None:
            if self.images is not None:
                refuse(f"prompt_logprobs={options.prompt_logprobs}", "the prompt has more than text in it")
            self.prompt_logprobs = PromptLogprobs(self.ids, options.prompt_logprobs, vocabulary_of(prepared.model))
        if options.lookahead is not None:
            warn_of_precision(prepared)

    def row(self, drafter: Drafter) -> Row:
        """Return the row that writes the answer."""
        sampler = None
        if self.seed is not None:
            sampler = LoneSampler(torch.Generator(self._prepared.input_ids.device).manual_seed(self.seed))
        return row_for(self._prepared, 0, self.ids, drafter, sampler=sampler, record=self._record)

    def reason(self, row: Row) -> StopReason | None:
        """Return why the row has ended; None if it has not."""
        reason = self._record.ended_by
        own = ids_of(self._prepared.model.generation_config.eos_token_id)
        return "stop_token" if reason == "eos" and own and row.tokens[-1] not in own else reason

    def annotated(self, step: Step, *, last: bool) -> Step:
        """Return the next step, with which the answer ends if it is the last, with text and logprobs if requested."""
        tokens = len(step.tokens)
        logprobs = self._record.taken(tokens)
        if self.text is None:
            return step if logprobs is None else replace(step, logprobs=logprobs)
        if last:
            self.text.finish()
        return replace(step, logprobs=logprobs, texts=self.text.taken(tokens))

    def output(self, row: Row) -> Output:
        """Return what `model.generate` returns, from the row that has ended."""
        return output_of(self._prepared, [row.written], self._record)


def prepare(
    model: Any,
    input_ids: torch.Tensor | Sequence[int],
    arguments: dict[str, Any],
    *,
    options: RequestOptions,
    plan: MaskPlan | None = None,
) -> EngineRequest:
    """Prepare a request with `model.generate`, without feeding it.

    The ids of the prompt are `[L]` or `[1, L]`. Without the model's mask plan, from `lade.supports`, it is computed,
    which walks through all modules.

    Raises:
        InputError: the prompt is empty, has ids outside the vocabulary, or is with its answer longer than a table of
            positions.
        UnsupportedModelError, UnsupportedArgumentError: the request cannot be served exactly.
    """
    arguments = with_present_cache_name(arguments)
    for name, remedy in _REFUSED.items():
        if arguments.get(name) is not None:
            refuse(name, remedy)
    prompt = _as_prompt(input_ids, input_device(unwrap(model)))
    arguments, text = {**arguments, "input_ids": prompt}, options.text(prompt[0].tolist())
    if text is not None:
        arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), text])
    if options.tokenizer is not None:
        arguments["tokenizer"] = options.tokenizer  # also needed by stop_strings and grammars
    if options.grammar is not None:
        arguments = GRAMMARS.load().with_grammar(unwrap(model), options.grammar, arguments)
    make = functools.partial(EngineRequest, options=options, text=text, plan=plan)
    use = custom_generate_for(make, model, call.prediction_ids(options.prediction, options.tokenizer))
    try:
        _refuse_contexts(unwrap(model), arguments)
        arguments = call.arguments_for_callable(model, unwrap(model), arguments)
        request: EngineRequest = model.generate(custom_generate=use, **arguments)
    except BaseException as problem:
        call.clean_up(model)
        if isinstance(problem, UnsupportedArgumentError):
            raise UnsupportedArgumentError(problem.reason, REMEDY) from None  # replaces a remedy about fallbacks
        raise
    return request


def refuse(what: str, why: str) -> None:
    """Raise `UnsupportedArgumentError` for an argument."""
    raise UnsupportedArgumentError(f"{what} cannot be used with lade.Engine: {why}", REMEDY)


def _refuse_contexts(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Refuse hooks and contexts that end with the caller's call: an engine decodes later, in its own thread."""
    call.refuse_adapter_arguments(arguments, "lade.Engine")
    call.refuse_adapter_hooks(model, "lade.Engine")
    if torch.is_autocast_enabled(input_device(model).type):
        refuse("torch.autocast", "it decodes in a thread of its own, which has none; load the model in that dtype")


def _as_prompt(input_ids: torch.Tensor | Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the prompt as an int64 tensor, `[1, L]`."""
    if not isinstance(input_ids, torch.Tensor):
        if isinstance(input_ids, str | Mapping) or any(isinstance(token, str) for token in input_ids):
            raise InputError(call.not_ids_message("input_ids", input_ids))
        if not all(isinstance(token, int) for token in input_ids):
            raise InputError("input_ids are not integers: give the ids of one prompt, [L] or [1, L]")
        input_ids = torch.tensor(input_ids, dtype=torch.long)
    prompt = input_ids if input_ids.ndim > 1 else input_ids[None]
    if prompt.ndim != 2 or prompt.shape[0] != 1:
        raise InputError(f"input_ids has shape {list(input_ids.shape)}: give the ids of one prompt, [L] or [1, L]")
    return prompt.to(device)


def _check_positions(model: PreTrainedModel, most_tokens: int) -> None:
    """Refuse lengths that would fail a pass, or change the rotary frequencies, for all of its rows."""
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    if config.model_type in LEARNED_POSITIONS and length and most_tokens > length + 1:  # the last token is not fed
        raise InputError(
            f"prompt and answer have {most_tokens} tokens, and {type(model).__name__} has positions for {length}: "
            "give a smaller max_new_tokens"
        )
    positions = Positions.of(config)
    for wall in (positions.longrope_switch, positions.dynamic):
        if wall is not None and most_tokens > wall:
            why = f"from {wall} tokens on, the length of one row changes how this model attends in the others"
            refuse(f"max_length={most_tokens}", why)


MAX_CLIENTS = 16  # most clients whose compiled grammars are kept
_MOST_SLOW = 64  # most failed grammars of a client that are remembered
_client = ContextVar("client", default=("", False))
"""The client that a thread serves, and whether unknown grammars are tried."""


class UntriedGrammarError(Exception):
    """A grammar needs a trial before it is compiled, which may take long, see `serving_client`."""


@contextmanager
def serving_client(client: str, *, tries: bool = False) -> Iterator[None]:
    """Serve a client in this thread, with trials of unknown grammars or without; others' grammars are not used."""
    token = _client.set((client, tries))
    try:
        yield
    finally:
        _client.reset(token)


class GrammarCompiler:
    """Compiles grammars that clients have sent, each of them in another process first, which can be killed.

    What is compiled is kept for each client, see `serving_client`: how soon one compiles tells what is known.

    Raises:
        InputError: grammars cannot be used with the tokenizer.
        MissingExtraError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Any, ends: Iterable[int]) -> None:
        from lade.backends.grammar.compiled import vocabulary_of_tokenizer
        from lade.backends.grammar.trial import GrammarTrial

        self._vocabulary = vocabulary_of_tokenizer(tokenizer, ends)
        self._trial = GrammarTrial(self._vocabulary.specials)
        self._of_client = functools.lru_cache(MAX_CLIENTS)(self._with_trials)

    def _with_trials(self, client: str) -> Vocabulary:
        """Return a vocabulary for one client, whose untried grammars are tried in the process."""
        slow: OrderedDict[str, str] = OrderedDict()  # failed grammars, and the reasons

        def try_first(grammar: str) -> None:
            if (why := slow.get(grammar)) is not None:
                raise GrammarError(why)
            if not _client.get()[1]:
                raise UntriedGrammarError
            try:
                self._trial(grammar)
            except GrammarError as problem:
                slow[grammar] = str(problem)
                if len(slow) > _MOST_SLOW:
                    slow.popitem(last=False)
                raise

        return self._vocabulary.with_trial(try_first)

    def special_id(self, text: str) -> int | None:
        """Return the id of a special token, which no text of a grammar matches; None if `text` is not one."""
        return self._vocabulary.special_id(text)

    def compiled(self, source: str) -> object:
        """Compile the source of a grammar.

        Raises:
            InputError: it is invalid; a `GrammarError` if it takes too long.
            UntriedGrammarError: it would have to be tried.
            OSError: it could not be tried.
        """
        return self._of_client(_client.get()[0]).compiled(source)

    @staticmethod
    def budget(seconds: float, token_seconds: float) -> GrammarBudget:
        """Return the CPU time for following the grammars of one request: so many seconds, and more for each token."""
        from lade.backends.grammar.compiled import GrammarBudget

        return GrammarBudget(seconds, token_seconds)

    def processor(self, grammar: Grammar, budget: GrammarBudget | None = None) -> LogitsProcessor:
        """Return the logits processor of one answer; raises like `compiled`."""
        from lade.backends.grammar.backend import processor_of

        return processor_of([grammar], self._of_client(_client.get()[0]), budget)

    def close(self) -> None:
        """Stop the process."""
        self._trial.close()
