"""The public ways to decode: `lade.generate`, `lade.stream`, and `model.generate(custom_generate=lade.decode)`.

Behind all of them is a `Session`: one generation, of one row or of a batch, prepared by `model.generate`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib import import_module
from typing import Any, Literal, Protocol, cast, overload

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateOutput

from lade.config import Lookahead, LookaheadConfig
from lade.decoding.drafting.drafter import Drafter
from lade.decoding.loop import DecodeLoop
from lade.decoding.row import Row
from lade.errors import UnsupportedError
from lade.grammar import GrammarArgument
from lade.hf.batch_rules import check_lengths, needs_lock_step
from lade.hf.call import (
    Call,
    Generated,
    NeedsGenerateError,
    Prediction,
    cleaning_up,
    refuse_adapter_arguments,
    refuse_streamed_beams,
    refuse_streamed_rows,
    refuse_streamed_segments,
    shared,
)
from lade.hf.job import DecodeJob, DraftSpec, Output, output_of, record_for, runner_of, with_use_mtp
from lade.hf.processors import row_for
from lade.hf.refusals import check, check_switch, refuse_slow_beams, warn_of_precision
from lade.hf.sampling import Draws, LoneSampler, RowSampler, Sampler
from lade.model.inputs import MaskPlan
from lade.model.prepared import Prepared
from lade.model.runner import EagerRunner
from lade.stats import Stats, Step


def decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    prediction: Prediction | None = None,
    inputs_tensor: torch.Tensor | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Generated:
    """The callable for `custom_generate=`; transformers prepares its arguments and returns its result.

    Transformers forwards neither `streamer=` nor the `tokenizer=` of `stop_strings=` to a callable: it raises an error
    for stop strings, and this function does for a streamer, after ending it. `lade.enable`, `lade.generate` and, for a
    streamer, `lade.decoder` support them.

    >>> model.generate(**inputs, custom_generate=lade.decode, lookahead=lade.LookaheadConfig(15, 5, 15))

    Args:
        model: the model whose `generate` was called.
        input_ids: `[B, L]` int64, padded on the left.
        logits_processor: processors, called once per emitted token as in plain decoding. In a batch transformers' own
            are called for each row separately, unless the rows are beams; with any other all rows advance in lock-step.
        stopping_criteria: criteria, called once per emitted token; in a batch like the processors.
        generation_config: the final, merged config.
        lookahead: settings: W, N, G; "auto" takes the defaults and falls back to plain decoding, with one
            `FallbackWarning`, where they are not supported, or known to be slower: beam search over several prompts on
            a CPU; None decodes plainly.
        stats: figures to add to; None for none.
        prediction: ids of the expected answer, see `lade.generate`.
        inputs_tensor: input of the encoder, if the model has one: drafts are taken from that text too.
        streamer: gets the prompt, every token, and `end()`; given by `lade.decoder` alone.
        model_kwargs: attention mask, cache and other arguments that `generate` prepared.

    Raises:
        UnsupportedModelError, UnsupportedArgumentError: an explicit config cannot be served, or there is a streamer.
        InputError: the prompt cannot be decoded.
    """
    with cleaning_up(model):
        call = Call.of_callable(model, lookahead, stats, prediction, streamer)
        arguments = (model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        prepared = Prepared(*arguments, wrapper=model, inputs_tensor=inputs_tensor, predictions=call.predictions)
        if streamer is not None:
            refuse_streamed_beams(prepared.beams)
        return _decode_prepared(call, prepared)


def decoder(*, streamer: BaseStreamer | None = None) -> Callable[..., Generated]:
    """Return a `decode` with a streamer, which transformers does not forward to a callable.

    Do not pass the streamer to `model.generate` as well: it gets the prompt, every token, and `end()` from here.

    >>> model.generate(**inputs, custom_generate=lade.decoder(streamer=TextStreamer(tokenizer)))
    """
    return functools.partial(decode, streamer=streamer)


def _decode_prepared(call: Call, prepared: Prepared, *, unassisted: bool = True) -> Generated:
    """Decode prepared inputs; `unassisted` as in `decoding_method`, false where `model.generate` is called again."""
    session = session_for(call, prepared)
    if session is not None:
        return session.run()
    plain = import_module("lade.hf.plain")  # few calls need it
    return cast(Generated, plain.decode_prepared(prepared, call.stats, call.streamer, unassisted=unassisted))


@overload
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    return_dict_in_generate: Literal[True],
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    streamer: BaseStreamer | None = None,
    prediction: Prediction | None = None,
    grammar: GrammarArgument | None = None,
    **generate_arguments: Any,
) -> GenerateOutput: ...


@overload
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    return_dict_in_generate: Literal[False],
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    streamer: BaseStreamer | None = None,
    prediction: Prediction | None = None,
    grammar: GrammarArgument | None = None,
    **generate_arguments: Any,
) -> torch.Tensor: ...


@overload
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    streamer: BaseStreamer | None = None,
    prediction: Prediction | None = None,
    grammar: GrammarArgument | None = None,
    **generate_arguments: Any,
) -> Generated: ...  # a generation_config decides


@shared()
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    streamer: BaseStreamer | None = None,
    prediction: Prediction | None = None,
    grammar: GrammarArgument | None = None,
    **generate_arguments: Any,
) -> Generated:
    """`model.generate` with lookahead decoding: same arguments, same tokens, fewer forward passes.

    >>> stats = lade.Stats()
    >>> ids = lade.generate(model, input_ids=ids, max_new_tokens=200, stats=stats)
    >>> stats.tokens_per_step
    2.1

    Args:
        model: a transformers causal language model or encoder-decoder model, or one wrapped by PEFT.
        inputs: `[B, L]` int64, the prompts, padded on the left, or the encoder's input; usually given as
            `input_ids=`. Rows of a batch leave it when they end; with `num_beams` all prompts step together.
        lookahead: settings, "auto" or None, see `lade.decode`.
        stats: figures to add to; None for none.
        streamer: gets the prompt, and each token right after the stopping criteria were called; None for none.
        prediction: expected answer, for instance a file that is to be edited: ids, or text with a `tokenizer=`; in a
            batch one per prompt. It changes the speed, never a token.
        grammar: a `lade.Grammar` that constrains the answer, with a `tokenizer=`; in a batch one for all prompts, or
            one per prompt. The tokens are those of `model.generate` with its processor in `logits_processor`.
        generate_arguments: any other argument of `model.generate`. After an error a cache passed as
            `cache`, or `past_key_values`, holds the text so far, as after plain decoding.

    Returns:
        The ids that `model.generate` returns, `[B, L + new]` int64, or its output object with
        `return_dict_in_generate=True`. Its cache is of transformers' own kind; that of a batch, or of a prompt with
        padding, is filled by a pass over the texts when it is first read. Padded beams and batches with media or an
        encoder have none, and recurrent layers a `TreeCache`.

    Raises:
        UnsupportedModelError, UnsupportedArgumentError: an explicit config cannot be served.
        InputError: the prompt cannot be decoded, or the prediction or the grammar is not valid.
        ConfigError: a prediction was given with `lookahead=None`.
    """
    with cleaning_up(model):
        call = Call.of(model, inputs, generate_arguments, lookahead, stats, prediction, grammar, streamer)
        with suppress(NeedsGenerateError):
            if arguments := call.for_callable(functools.partial(_decode_prepared, call, unassisted=False)):
                return cast(Generated, model.generate(**arguments))
        return cast(Generated, import_module("lade.hf.plain").generate_plainly(model, stats, streamer, call.arguments))


@shared(streams=True)
def stream(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    prediction: Prediction | None = None,
    grammar: GrammarArgument | None = None,
    **generate_arguments: Any,
) -> Iterator[Step]:
    """Run `generate` for one prompt, step by step: an iterator over `Step`s, whose tokens together are the new tokens.

    Arguments and errors are those of `generate`; errors are raised by the call, not by the first step. The iteration
    may be stopped early: a cache of the caller's then holds the text of the steps that were yielded.

    >>> for step in lade.stream(model, input_ids=ids, max_new_tokens=200):
    ...     print(tokenizer.decode(step.tokens), end="", flush=True)
    """
    with cleaning_up(model):
        call = Call.of(model, inputs, generate_arguments, lookahead, stats, prediction, grammar)
        refuse_streamed_rows(call.inner, call.arguments)
        if call.config is not None:
            try:
                refuse_adapter_arguments(call.arguments, "lade.stream")
                refuse_streamed_segments(call.inner)
                make = functools.partial(Session, config=call.config, stats=Stats() if stats is None else stats)
                return iter(model.generate(**call.with_callable(make)))
            except UnsupportedError as problem:
                call.fall_back(problem)
        return cast(Iterator[Step], import_module("lade.hf.plain").plain_steps(model, stats, call.arguments))


class Session:
    """A generation: iterate over it for its steps; `output()` then returns the result of `model.generate`.

    Args:
        prepared: inputs prepared by `model.generate`; several rows advance at their own pace, see `batch_rules`.
        config: the method and its sizes.
        stats: figures to add to.
        streamer: gets the prompt and every token, as from `model.generate`; None for none.
        prompt_streamed: whether the streamer has got the prompt already.
        drafter: a drafter to use instead of the one that `config` describes; a new one for each generation.

    Raises:
        InputError: the prompt is empty, has ids outside the vocabulary, or is too long for a table of positions.
        ValueError: a drafter is given for several rows.
        UnsupportedModelError, UnsupportedArgumentError: it cannot be decoded exactly.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        config: LookaheadConfig,
        stats: Stats,
        streamer: BaseStreamer | None = None,
        prompt_streamed: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        self._prepared, self._streamer, self._prompt_streamed = prepared, streamer, prompt_streamed
        config = with_use_mtp(prepared.generation_config, config)
        plan, self._texts, images = check(prepared)
        self._is_batch = len(self._texts.ids) > 1
        # Ours has no slots for padding, which plain decoding would expect, and only the last rows of a batch.
        self._as_batch = self._is_batch or bool(self._texts.padding)
        runner = self._checked_runner(plan)
        warn_of_precision(prepared)
        handed_out = bool(prepared.generation_config.return_dict_in_generate) and not self._as_batch
        # Without a user's cache transformers makes one, which is empty and cannot hold a tree.
        self._given_cache: Cache = runner.tree_cache() if prepared.user_cache is None else prepared.user_cache
        max_length = prepared.generation_config.max_length
        self._cache = runner.borrow(self._given_cache, max_length, handed_out=handed_out)
        self._record = record_for(prepared.generation_config)
        self._draws = Draws(len(self._texts.ids)) if self._is_batch and prepared.generation_config.do_sample else None
        without_mtp = "" if images is None else "prompts with media, embeddings or gaps have different positions"
        self._job = DecodeJob(prepared.model, runner, rows=len(self._texts.ids), without_mtp=without_mtp)
        self._rows = self._make_rows(self._drafters(config, drafter))
        self._job.report_to(stats, config)
        self._known = sys.maxsize  # number of tokens that the caller has received
        cache: Any = self._cache  # of the type that the runner needs
        self._loop = DecodeLoop(
            list(self._rows),
            runner if images is None else runner.for_prompts(images),
            cache,
            stats,
            self._job.budget,
            waits_for_all=True,
            reader=runner.reader,
            mtp=self._job.mtp,
        )

    def _checked_runner(self, plan: MaskPlan) -> EagerRunner:
        """Return the runner, after checking that it can make all passes of these texts."""
        prepared, config = self._prepared, self._prepared.generation_config
        runner = runner_of(prepared, plan)
        check_switch(runner, self._texts.width, config.max_length - self._texts.shown + self._texts.width)
        if self._is_batch:
            check_lengths(runner.positions, self._texts, config.max_length)
        return runner

    def _drafters(self, config: LookaheadConfig, given: Drafter | None) -> list[Drafter]:
        """Return one drafter per row."""
        if given is not None:
            if self._is_batch:
                raise ValueError("a drafter serves one row: give it with one prompt")
            return [self._job.adopt(given)]
        specs = DraftSpec.of_rows(self._prepared, config, self._texts.ids)
        return self._job.drafters(specs, alone=not self._is_batch)

    def _make_rows(self, drafters: list[Drafter]) -> list[Row]:
        rows = []
        for number, (text, drafter) in enumerate(zip(self._texts.ids, drafters, strict=True)):
            sampler: Sampler | None = None
            if self._prepared.generation_config.do_sample:
                sampler = LoneSampler() if self._draws is None else RowSampler(self._draws, number)
            row = row_for(
                self._prepared,
                number,
                text,
                drafter,
                sampler=sampler,
                record=self._record,
                streamer=self._streamer,
            )
            rows.append(row)
        return rows

    def __iter__(self) -> Iterator[Step]:
        """Decode, yielding one `Step` per forward pass and row.

        However the iteration ends, a user's cache then holds only text of the steps that were yielded.
        """
        self._known = len(self._texts.ids[0])
        with self._running():
            for steps in self._loop.run():
                self._after_pass()
                self._known = len(self._rows[0].tokens)
                yield from steps

    def run(self) -> Output:
        """Decode to the end. An error leaves a user's cache as plain decoding would."""
        with self._running():
            for _ in self._loop.run():
                self._after_pass()
        return self.output()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Stream the prompt; at the end, end the streamer, give the cache back and save the measured costs."""
        with ExitStack() as stack:
            stack.push(self._end_stream)
            stack.callback(self._job.save)
            for row in self._rows:
                stack.callback(row.drafter.close)
            stack.push(self._give_back)
            if self._streamer is not None and not self._prompt_streamed:
                self._streamer.put(self._prepared.input_ids.cpu())
            yield

    def _give_back(self, problem: type[BaseException] | None, *_: object) -> None:
        """Give the cache back with accepted text only; empty if it is not used again."""
        used = not self._is_batch and (self._prepared.user_cache is not None or problem is None)
        self._cache.give_back(min(self._loop.settled[0], self._known) if used else 0)

    def _end_stream(self, problem: type[BaseException] | None, *_: object) -> None:
        """End the streamer, even after an error: the reader of a TextIteratorStreamer would block forever."""
        if self._streamer is None:
            return
        with suppress(Exception) if problem else nullcontext():  # a broken streamer must not hide the first error
            self._streamer.end()

    def _after_pass(self) -> None:
        """Update the state that all rows of a batch share."""
        if self._draws is not None:
            for number, row in enumerate(self._rows):
                if row.done:
                    self._draws.leave(number)
        self._job.resize(len(self._loop.rows))

    def output(self) -> Output:
        """Return the result of `model.generate`: ids `[B, L]` int64, prompts included, or an output object with them.

        Rows that ended before others are padded.
        """
        cache = None if self._as_batch else self._given_cache
        return output_of(self._prepared, [row.written for row in self._rows], self._record, cache)


class DecodeSession(Protocol):
    """A generation that has been checked and composed, and has not begun."""

    def run(self) -> Generated:
        """Decode to the end, and return the result of `model.generate`."""
        ...


def session_for(call: Call, prepared: Prepared) -> DecodeSession | None:
    """Return the session that decodes prepared inputs, or None to decode them plainly.

    This is the single place for refusals, before anything is fed, drawn or streamed; errors are those of `Session`.
    """
    if call.config is None:
        return None
    try:
        options: dict[str, Any] = {"config": call.config, "stats": Stats() if call.stats is None else call.stats}
        if prepared.beams > 1:
            if call.auto:
                refuse_slow_beams(prepared)
            return cast(DecodeSession, import_module("lade.hf.lock_step").BeamSession(prepared, **options))
        options["streamer"] = call.streamer
        rules, several = prepared.positional[1:], len(prepared.prompts) > 1
        if several and needs_lock_step(*rules, streamed=call.streamer is not None):  # few calls need it
            return cast(DecodeSession, import_module("lade.hf.lock_step").LockStepSession(prepared, **options))
        return Session(prepared, **options)
    except UnsupportedError as problem:
        call.fall_back(problem)
        return None
