"""Continuous batching: requests from any thread, decoded together by one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from lade.config import Lookahead
from lade.errors import ConfigError, UnsupportedArgumentError, UnsupportedModelError
from lade.grammar import Grammar
from lade.hf.arguments import check_stats
from lade.hf.distributed import led_by_this_process
from lade.hf.predictions import Prediction
from lade.hf.refusals import resolve
from lade.model.facts import ModelFacts
from lade.model.support.supports import supports, unwrap
from lade.serving.batch import Batch
from lade.serving.handle import Handle, Place
from lade.serving.request import Extras, prepare
from lade.serving.scheduler import Scheduler
from lade.serving.snapshot import Snapshot
from lade.stats import Stats, Step


class Engine:
    """Decodes the requests of many threads together: each step is one forward pass for all of them.

    Requests come and go between steps. What is written for one of them does not depend on the others: each gets the
    tokens that `model.generate` gives for its prompt alone, with its own arguments and its own seed.

    >>> with lade.Engine(model) as engine:
    ...     handles = [engine.add(ids, max_new_tokens=200) for ids in prompts]
    ...     texts = [tokenizer.decode(handle.result()[0]) for handle in handles]

    Requests are decoded together as long as their texts fit beside each other as they are. When they have grown too
    long, the one that began last makes room, and goes on with the same tokens when there is room again, before
    requests that have not begun.

    Other threads may call the model while the engine is open, to generate or for anything else that leaves it as it is;
    this takes machine time from its requests. Requests share nothing but the model; give all of them one
    `LookaheadConfig(memory=...)` where they may learn from each other's texts.

    Args:
        model: a transformers causal language model, or one wrapped by PEFT.
        max_rows: requests decoded at a time; more wait.
        max_tokens: slots of the KV cache, which are rows times tokens of the longest one, tree included; more wait.
            With captured passes, on a CUDA device, rows and tokens are rounded up to the sizes of these. None: as many
            as fit in a quarter of the host's memory, or in 29 % of what is free on a CUDA device. Where all layers are
            recurrent, tokens take no memory, and slots are bytes of states.
        max_waiting: requests that may wait, beside those that there are free rows for.
        prefill_tokens: of new prompts, fed between two steps at most, so that a long one does not hold up the others.
            Prompts that are read in one pass are padded to the longest, which counts.
            Models with recurrent layers are fed two at least, and those of Mamba 1 whole prompts; so are those whose
            indexers pick keys, beyond as many tokens as they pick.
            A prompt with images is fed at once.
        prefix_cache: bytes of texts, prompts and answers, that are kept beside the cache: a prompt that begins like one
            of them, such as the next turn of a conversation, is fed from there on, with the same tokens. 0 for none.
            Only requests of the same `scope` share texts; prompts with images do not. Where indexers pick keys, as many
            first tokens are shared as they pick (`index_topk`): what comes later depends on the whole prompt.

    Attributes:
        max_tokens: as given or found.
        token_bytes: what a slot takes. The cache may take `max_tokens` of them, and while it grows up to 2.75 times as
            much, the prompt that joins included.

    Raises:
        UnsupportedModelError: the model cannot be decoded exactly with a token tree, or has an encoder; or several
            processes decode it, and this is not the first one: the others call `lade.follow`.
        ClusterError: these processes take part in another call.
        UnsupportedArgumentError: `prefix_cache` on a model with recurrent layers.
        ConfigError: a limit that is no whole number.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int = 16,
        max_tokens: int | None = None,
        max_waiting: int = 1024,
        prefill_tokens: int = 512,
        prefix_cache: int = 0,
    ) -> None:
        limits = {"max_rows": max_rows, "max_waiting": max_waiting, "prefill_tokens": prefill_tokens}
        for name, limit in (limits if max_tokens is None else {**limits, "max_tokens": max_tokens}).items():
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise ConfigError(name, limit, "give a whole number >= 1")
        if isinstance(prefix_cache, bool) or not isinstance(prefix_cache, int) or prefix_cache < 0:
            raise ConfigError("prefix_cache", prefix_cache, "give a whole number of bytes >= 0")
        self._model = model
        led = led_by_this_process(unwrap(model))
        try:
            self._plan = supports(model).require()
            _refuse_encoders(unwrap(model))
            if prefix_cache:
                _refuse_states(unwrap(model))
            batch = Batch(
                unwrap(model),
                self._plan,
                prefill_tokens=prefill_tokens,
                max_rows=max_rows,
                max_tokens=max_tokens,
                prefix_cache=prefix_cache,
            )
        except BaseException as problem:
            if led is not None:
                led.end(problem=problem)
            raise
        self.token_bytes, self.max_tokens = batch.capacity.token_bytes, batch.capacity.max_tokens
        self._scheduler = Scheduler(batch, max_waiting, None if led is None else led.close)
        self._finalizer = weakref.finalize(
            self, self._scheduler.close
        )  # also when it is forgotten, and when Python ends

    def add(
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        lookahead: Lookahead = "auto",
        on_step: Callable[[Step], None] | None = None,
        seed: int | None = None,
        stats: Stats | None = None,
        prediction: Prediction | None = None,
        grammar: Grammar | None = None,
        place: Place | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        stop_texts: Sequence[str] | None = None,
        tokenizer: Any = None,
        skip_special_tokens: bool = True,
        scope: str | None = None,
        client: str | None = None,
        **generate_arguments: Any,
    ) -> Handle:
        """Add a prompt to be continued; returns as soon as it is prepared. Several threads may do so at a time.

        Args:
            input_ids: `[L]` or `[1, L]` ids of one prompt.
            lookahead: a `LookaheadConfig`, "auto" for the defaults, or None for plain decoding beside the others.
            on_step: is called with each `Step`, by the thread that decodes: all requests wait for it.
            seed: of this request's draws, where it samples: the tokens are those that `torch.manual_seed(seed)` and
                `model.generate` give. None: one is drawn; the handle has it.
            stats: is added to; None for new ones, which the handle has.
            prediction: a text that the answer is expected to follow: its ids, or text and a `tokenizer=`.
            grammar: a `lade.Grammar` that the answer has to follow, with a `tokenizer=`. It is compiled by the caller's
                thread.
            place: in the queue, from `reserve`; None: one is taken now.
            logprobs: so many of the likeliest ids come with each token, with the log-probabilities of these and of the
                token itself, in `Step.logprobs`; they are those of the model's own logits, before processors.
            prompt_logprobs: the same for the tokens of the prompt, in `Handle.prompt_logprobs`. All of it is fed, even
                if a text that begins like it was kept.
            stop_texts: texts that end the answer, whose text is then in `Step.texts` and `Handle.text`, up to the first
                one of them. The ids end with the token that completes it. [] to be told the text alone.
            tokenizer: the model's, for `stop_texts`, a `prediction`, a `grammar`, and `stop_strings` of
                `model.generate`.
            skip_special_tokens: whether special tokens have no text there.
            scope: any text. What is kept of the request's is for requests of the same scope alone.
            client: who asks. Where several clients wait, their requests are served in turn. None: as the scope says.
            generate_arguments: anything that `model.generate` takes for one prompt, but beams, streamers and caches.
                The clock of `max_time` starts now.

        Raises:
            InputError: the grammar cannot be used; or the prompt cannot be decoded, or is with its answer too long for
                the engine or the model.
            UnsupportedArgumentError: the arguments cannot be served exactly.
            ConfigError: `lookahead`, `on_step`, `stats`, `seed`, `place`, `logprobs`, `prompt_logprobs`, `stop_texts`,
                `tokenizer`, `scope` or `client` is none.
            EngineFullError: as many requests wait as may.
            EngineClosedError: the engine was closed, or this process was forked from the engine's.
            concurrent.futures.CancelledError: its place was released before it was prepared.
        """
        config = resolve(lookahead)[0]
        check_stats(stats)
        if on_step is not None and not callable(on_step):
            raise ConfigError("on_step", on_step, "give a function that takes a Step, or None")
        if not isinstance(place, Place | None):
            raise ConfigError("place", place, "give one that reserve() returned, or None")
        extras = Extras(
            config,
            seed,
            prediction,
            grammar,
            logprobs,
            prompt_logprobs,
            stop_texts,
            tokenizer,
            skip_special_tokens,
            scope,
            client,
        )
        with ExitStack() as stack:
            if place is None:
                place = stack.enter_context(self.reserve())
            self._scheduler.check_place(place)
            known = None if unwrap(self._model).training else self._plan  # what training mode does is tried each time
            request = prepare(self._model, input_ids, generate_arguments, extras=extras, plan=known)
            return self._scheduler.take(request, place, Stats() if stats is None else stats, on_step)

    def reserve(self) -> Place:
        """Take a place in the queue before a request is prepared, so that one for which there is none costs nothing.

        Raises:
            EngineFullError: as many requests wait as may.
            EngineClosedError: see `add`.
        """
        return self._scheduler.reserve()

    def snapshot(self) -> Snapshot:
        """How it stands, and what it has done so far. Never waits for the thread that decodes."""
        return self._scheduler.snapshot()

    @property
    def problem(self) -> BaseException | None:
        """The error that ended the thread that decodes; None unless one did. Its requests have ended with it, too."""
        return self._scheduler.problem

    def close(self) -> None:
        """End all requests as cancelled and free what they took; returns when that is done. May be called again.

        Called by an `on_step`, it returns at once, and all end before the next step. In a forked process it does
        nothing: there the engine has no thread, and the other process continues its requests.
        """
        self._finalizer.detach()
        self._scheduler.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Engine decodes in the process that made it, and cannot be copied or pickled")

    def __repr__(self) -> str:
        return f"Engine({type(unwrap(self._model)).__name__}, {self._scheduler.state})"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def _refuse_encoders(model: PreTrainedModel) -> None:
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__}: the rows of an engine share one cache, which has no place for encoders' states",
            "use lade.generate, which decodes batches of encoder-decoder models, too",
        )


def _refuse_states(model: PreTrainedModel) -> None:
    if ModelFacts.of(model).recurrent:
        raise UnsupportedArgumentError(
            f"prefix_cache cannot be used with {type(model).__name__}: the states of its recurrent layers cannot go "
            "back to where another text begins to differ",
            "give 0",
        )
