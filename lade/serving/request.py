"""A request of an engine: one prompt, prepared by `model.generate`, and its decoding options."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList

from lade.config import LookaheadConfig
from lade.decoding.drafting.drafter import Drafter
from lade.decoding.row import Row
from lade.errors import ConfigError, InputError, UnsupportedArgumentError
from lade.grammar import Grammar
from lade.hf.arguments import arguments_for_callable, not_ids_message
from lade.hf.detokenizer import AnswerText
from lade.hf.generation_config import cleaning_up, refuse_adapter_arguments, refuse_adapter_hooks
from lade.hf.job import DraftSpec, Output, output_of, record_for
from lade.hf.predictions import Prediction, prediction_ids, refuse_unused_prediction
from lade.hf.processors import StopReason, row_for
from lade.hf.refusals import check, warn_of_precision
from lade.hf.sampling import LoneSampler
from lade.model import joint
from lade.model.config import LEARNED_POSITIONS, Positions
from lade.model.masks import MaskPlan
from lade.model.prepared import Prepared, custom_generate_for, ids_of, vocabulary_of
from lade.model.prompt_logits import PromptLogprobs
from lade.model.runner import input_device
from lade.model.support.supports import unwrap
from lade.serving.capacity import Need, largest_tree
from lade.stats import Step

PLAIN = LookaheadConfig(window=0, ngram=2, guesses=0)
"""The empty tree: one token a step."""
_SEEDS = 2**64


@dataclass(frozen=True)
class Extras:
    """Arguments of `Engine.add` that `model.generate` does not know.

    Attributes:
        lookahead: the method and its sizes; None for one token a step.
        seed: of its draws; None: one is drawn.
        prediction: a text that the answer is expected to follow.
        grammar: what the answer may be.
        logprobs: ids whose log-probabilities are told with each token; None for none, not even the token's own.
        prompt_logprobs: the same with each token of the prompt.
        stop_texts: texts that end the answer; None where its text is not told.
        tokenizer: makes text of ids.
        skip_special_tokens: whether special tokens have no text.
        scope: whose texts it shares.
        client: who asks; None: as the scope says.

    Raises:
        ConfigError: one of them is not valid.
    """

    lookahead: LookaheadConfig | None = None
    seed: int | None = None
    prediction: Prediction | None = None
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_texts: Sequence[str] | None = None
    tokenizer: Any = None
    skip_special_tokens: bool = True
    scope: str | None = None
    client: str | None = None

    def __post_init__(self) -> None:
        refuse_unused_prediction(self.prediction, self.lookahead)
        seed, stops = self.seed, self.stop_texts
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _SEEDS):
            raise ConfigError("seed", seed, "give a whole number from 0 to 2**64 - 1, or None to have one drawn")
        for name, top in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 0):
                raise ConfigError(name, top, "give a whole number >= 0, or None for none")
        for name, given in (("scope", self.scope), ("client", self.client)):
            if given is not None and not isinstance(given, str):
                raise ConfigError(name, given, "give a text that names whose request it is, or None")
        if stops is None:
            return
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ConfigError("stop_texts", stops, "give a list of texts, none of them empty; [] to be told the text")
        if not callable(getattr(self.tokenizer, "decode", None)):
            raise ConfigError("tokenizer", self.tokenizer, "give the model's tokenizer, which stop_texts needs")

    @property
    def config(self) -> LookaheadConfig:
        """The method and its sizes."""
        return self.lookahead or PLAIN

    def text(self, prompt: Sequence[int]) -> AnswerText | None:
        """Reads the answer to a prompt as text, if that is wanted."""
        if self.stop_texts is None:
            return None
        return AnswerText(self.tokenizer, prompt, self.stop_texts, skip_special_tokens=self.skip_special_tokens)


REMEDY = "leave it out, or use lade.generate"
_DRAWN_SEEDS = 2**32
_REFUSED = {
    "streamer": "give on_step, or iterate over the handle",
    "past_key_values": "rows of an engine share one cache",
}


class Request:
    """A prompt, how to continue it, and its answer in the end.

    Args:
        prepared: what `model.generate` has prepared.
        extras: its arguments that are not `model.generate`'s.
        text: the criterion among the stopping criteria that reads the answer as text, if there is one.
        plan: see `prepare`.

    Attributes:
        text: as given.
        config: the method and its sizes.
        scope: whose texts it shares.
        client: who asks.
        seed: the seed of its draws; None where nothing is drawn.
        draft_spec: what its drafter is made from.
        need: the room that it can come to take.
        ids: of the prompt, without padding.
        prompt_tokens: how many these are.
        prompt_logprobs: takes in how likely the tokens of the prompt are, where that is wanted; else None.
        images: the prompt where it has more than text in it, until it is prefilled; else None.

    Raises:
        InputError: the prompt is empty, has ids out of the vocabulary, or it or its answer is too long for a table of
            positions.
        UnsupportedModelError, UnsupportedArgumentError: it cannot be served exactly.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        extras: Extras,
        text: AnswerText | None,
        plan: MaskPlan | None,
    ) -> None:
        generation_config, self.config = prepared.generation_config, extras.config
        _, texts, self.images = check(prepared, plan=plan)
        if len(texts) > 1:
            refuse(f"num_return_sequences={generation_config.num_return_sequences}", "add a request for each of them")
        self._prepared, self.ids = replace(prepared, model_kwargs={}), texts.ids[0]  # images take memory
        self.need = Need(generation_config.max_length - texts.hidden[0], largest_tree(self.config))
        self.prompt_tokens = len(self.ids)
        _check_positions(prepared.model, self.need.tokens)
        if generation_config.prefill_chunk_size is not None and (prepared.facts.recurrent or prepared.facts.indexers):
            chunks = f"prefill_chunk_size={generation_config.prefill_chunk_size}"
            refuse(
                chunks,
                "it feeds prompts in pieces of its own, and what this model writes depends on where a piece begins",
            )
        self.text, self.scope, self.seed = text, extras.scope, None
        self.client = extras.scope if extras.client is None else extras.client
        if generation_config.do_sample:
            self.seed = secrets.randbelow(_DRAWN_SEEDS) if extras.seed is None else extras.seed
        self.draft_spec = DraftSpec.of_rows(prepared, self.config, texts.ids)[0]
        self._record = record_for(generation_config, extras.logprobs)
        self.prompt_logprobs = None
        if extras.prompt_logprobs is not None:
            if self.images is not None:
                refuse(f"prompt_logprobs={extras.prompt_logprobs}", "the prompt has more than text in it")
            self.prompt_logprobs = PromptLogprobs(self.ids, extras.prompt_logprobs, vocabulary_of(prepared.model))
        if extras.lookahead is not None:
            warn_of_precision(prepared.wrapper)

    def row(self, drafter: Drafter) -> Row:
        """The row that writes its answer."""
        sampler = None
        if self.seed is not None:
            sampler = LoneSampler(torch.Generator(self._prepared.input_ids.device).manual_seed(self.seed))
        return row_for(self._prepared, 0, self.ids, drafter, sampler=sampler, record=self._record)

    def reason(self, row: Row) -> StopReason | None:
        """What ended the row; None if nothing did."""
        reason = self._record.ended_by
        own = ids_of(self._prepared.model.generation_config.eos_token_id)
        return "stop_token" if reason == "eos" and own and row.tokens[-1] not in own else reason

    def told(self, step: Step, *, last: bool) -> Step:
        """A step with the text and the log-probabilities of its tokens, where they are wanted; to be called in order.

        Args:
            step: the next one, as the loop has it.
            last: whether the answer has ended with it.
        """
        tokens = len(step.tokens)
        logprobs = self._record.taken(tokens)
        if self.text is None:
            return step if logprobs is None else replace(step, logprobs=logprobs)
        if last:
            self.text.finish()
        return replace(step, logprobs=logprobs, texts=self.text.taken(tokens))

    def output(self, row: Row) -> Output:
        """What `model.generate` returns, given the row that has ended."""
        return output_of(self._prepared, [row.written], self._record)


def prepare(
    model: Any,
    input_ids: torch.Tensor | Sequence[int],
    arguments: dict[str, Any],
    *,
    extras: Extras,
    plan: MaskPlan | None = None,
) -> Request:
    """Have `model.generate` prepare a request; nothing is fed yet.

    Args:
        model: a model that `lade.supports`.
        input_ids: `[L]` or `[1, L]`.
        arguments: anything that `model.generate` takes.
        extras: arguments that are not `model.generate`'s.
        plan: how the model takes its masks, where `supports` has said it: asking walks through all its modules.

    Raises:
        InputError, UnsupportedModelError, UnsupportedArgumentError: see `Request`.
    """
    for name, remedy in _REFUSED.items():
        if arguments.get(name) is not None:
            refuse(name, remedy)
    prompt = _as_prompt(input_ids, input_device(unwrap(model)))
    arguments, text = {**arguments, "input_ids": prompt}, extras.text(prompt[0].tolist())
    if text is not None:
        arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), text])
    if extras.tokenizer is not None:
        arguments["tokenizer"] = extras.tokenizer  # which stop_strings and a grammar need, too
    if extras.grammar is not None:
        arguments = joint.load("grammar").with_grammar(unwrap(model), extras.grammar, arguments)
    make = functools.partial(Request, extras=extras, text=text, plan=plan)
    use = custom_generate_for(make, model, prediction_ids(extras.prediction, extras.tokenizer))
    with cleaning_up(model, arguments.get("generation_config")):
        try:
            _refuse_contexts(unwrap(model), arguments)
            request: Request = model.generate(custom_generate=use, **arguments_for_callable(model, arguments))
        except UnsupportedArgumentError as problem:
            raise UnsupportedArgumentError(problem.reason, REMEDY) from None  # no "auto" falls back to anything here
    return request


def refuse(what: str, why: str) -> None:
    """Raise the `UnsupportedArgumentError` for an argument."""
    raise UnsupportedArgumentError(f"{what} cannot be used with lade.Engine: {why}", REMEDY)


def _refuse_contexts(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Refuse what is in effect only while the caller's call lasts: an engine decodes later, in a thread of its own."""
    refuse_adapter_arguments(arguments, "lade.Engine")
    refuse_adapter_hooks(model, "lade.Engine")
    if torch.is_autocast_enabled(input_device(model).type):
        refuse("torch.autocast", "it decodes in a thread of its own, which has none; load the model in that dtype")


def _as_prompt(input_ids: torch.Tensor | Sequence[int], device: torch.device) -> torch.Tensor:
    """`[1, L]` int64."""
    if not isinstance(input_ids, torch.Tensor):
        if isinstance(input_ids, str | Mapping) or any(isinstance(token, str) for token in input_ids):
            raise InputError(not_ids_message("input_ids", input_ids))
        if not all(isinstance(token, int) for token in input_ids):
            raise InputError("input_ids are no whole numbers: give the ids of one prompt, [L] or [1, L]")
        input_ids = torch.tensor(input_ids, dtype=torch.long)
    prompt = input_ids if input_ids.ndim > 1 else input_ids[None]
    if prompt.ndim != 2 or prompt.shape[0] != 1:
        raise InputError(f"input_ids has shape {list(input_ids.shape)}: give the ids of one prompt, [L] or [1, L]")
    return prompt.to(device)


def _check_positions(model: PreTrainedModel, most_tokens: int) -> None:
    """Refuse texts that could make a pass fail, or change the frequencies, for all its rows."""
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    if config.model_type in LEARNED_POSITIONS and length and most_tokens > length + 1:  # the last one is not fed
        raise InputError(
            f"{most_tokens} tokens of prompt and answer are more than {type(model).__name__} has positions for, which "
            f"are {length}: give a smaller max_new_tokens"
        )
    positions = Positions.of(config)
    for wall in (positions.longrope_switch, positions.dynamic):
        if wall is not None and most_tokens > wall:
            refuse(f"max_length={most_tokens}", f"from {wall} tokens on, a row decides how this model sees the others")
