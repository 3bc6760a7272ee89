"""Continuous batching engine: requests from any thread, decoded together by one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from lade.config import Lookahead
from lade.errors import UnsupportedArgumentError, UnsupportedModelError, whole_number
from lade.grammar import Grammar
from lade.hf.call import Prediction
from lade.hf.refusals import precision_note
from lade.model.facts import ModelFacts
from lade.model.supports import may_be_shared, supports, unwrap
from lade.serving.batch import EngineBatch
from lade.serving.handle import Handle
from lade.serving.request import RequestOptions, prepare
from lade.serving.scheduler import QueueSlot, Scheduler
from lade.serving.snapshot import CurrentWork, EngineSnapshot
from lade.stats import Stats, Step
from lade.tuning.cost_cache import forget_texts


class Engine:
    """Decodes the requests of many threads together: each step is one forward pass for all of them.

    Requests join and leave between steps. Each gets the tokens that `model.generate` gives for its prompt alone, with
    its own arguments and its own seed, whatever the other requests are.

    >>> with lade.Engine(model) as engine:
    ...     handles = [engine.add(ids, max_new_tokens=200) for ids in prompts]
    ...     texts = [tokenizer.decode(handle.result()[0]) for handle in handles]

    Requests are admitted as long as their texts fit in the cache at their current lengths. When they have outgrown it,
    the latest one is preempted. It resumes with the same tokens when there is room, before new requests are admitted.

    Other threads may call the model while the engine is open, as long as they do not modify it; they compete for the
    machine. Requests share nothing but the model; pass all of them one `LookaheadConfig(memory=...)` to let them learn
    from each other's texts.

    Args:
        model: a transformers causal language model, or one wrapped by PEFT.
        max_rows: maximum number of requests decoded at a time; further ones wait.
        max_tokens: slots of the KV cache: rows times the tokens of the longest one, its tree included. With captured
            graphs, on a CUDA device, rows and tokens are rounded up to graph sizes. None: 25 % of the host's memory, or
            29 % of the free memory of a CUDA device. If all layers are recurrent, a slot is one byte of their states.
        max_waiting: maximum number of waiting requests, beyond those that free rows could take.
        prefill_tokens: maximum number of prompt tokens fed between two steps, so that long prompts do not stall the
            other requests. Padding of prompts fed in one pass counts. Models with recurrent layers are fed at least two
            tokens, Mamba 1 whole prompts; models whose indexers select keys are fed whole prompts beyond `index_topk`
            tokens. A prompt with images is fed at once.
        prefix_cache: size of the prefix cache in bytes; 0 disables it; None: a tenth of the KV cache's default size, or
            0 if the model has recurrent layers. A prompt that begins like a cached prompt or answer, such as the next
            turn of a conversation, is fed from the first difference on, with the same tokens. Only requests of one
            `scope` share prefixes; prompts with images share none. If indexers select keys, at most `index_topk` tokens
            are shared, since later ones depend on the whole prompt.

    Attributes:
        max_tokens: slots of the KV cache.
        token_bytes: bytes of one slot. The cache takes up to `max_tokens` slots, and up to 2.75 times as much while it
            grows, the joining prompt included.

    Raises:
        UnsupportedModelError: the model cannot be decoded exactly with a token tree, has an encoder, or is decoded by
            several processes of which this is not the first; the others call `lade.follow`.
        ClusterError: these processes take part in another call.
        UnsupportedArgumentError: `prefix_cache` with a model that has recurrent layers.
        ConfigError: a limit is not a whole number in range.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int = 16,
        max_tokens: int | None = None,
        max_waiting: int = 1024,
        prefill_tokens: int = 512,
        prefix_cache: int | None = 0,
    ) -> None:
        limits = {"max_rows": max_rows, "max_waiting": max_waiting, "prefill_tokens": prefill_tokens}
        for name, limit in (limits if max_tokens is None else {**limits, "max_tokens": max_tokens}).items():
            whole_number(name, limit, 1)
        if prefix_cache is not None:
            whole_number("prefix_cache", prefix_cache, 0, of=" of bytes")
        self._model = model
        led = None
        if may_be_shared(unwrap(model)):
            from lade.backends.processes.team import led_by_this_process

            led = led_by_this_process(unwrap(model))
        try:
            self._plan = supports(model).require()
            _refuse_encoders(unwrap(model))
            if prefix_cache:
                _refuse_states(unwrap(model))
            batch = EngineBatch(
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
        capacity = batch.running.capacity
        self.token_bytes, self.max_tokens = capacity.token_bytes, capacity.max_tokens
        self._scheduler = Scheduler(batch, max_waiting, None if led is None else led.close)
        self._finalizer = weakref.finalize(self, self._scheduler.close)  # on collection and at exit

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
        place: QueueSlot | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        stop_texts: Sequence[str] | None = None,
        tokenizer: Any = None,
        skip_special_tokens: bool = True,
        scope: str | None = None,
        client: str | None = None,
        **generate_arguments: Any,
    ) -> Handle:
        """Add a prompt to be continued; return once it is prepared. Thread-safe.

        Args:
            input_ids: ids of one prompt, `[L]` or `[1, L]`.
            lookahead: a `LookaheadConfig`, "auto" for the defaults, or None for plain decoding.
            on_step: called with each `Step` in the decoding thread; all requests wait for it.
            seed: seed of the draws, as `torch.manual_seed(seed)` before `model.generate`. None draws one, see `Handle`.
            stats: counters to add to; None for new ones, see `Handle.stats`.
            prediction: text that the answer is expected to follow: ids, or text and a `tokenizer`.
            grammar: grammar that the answer has to follow; needs a `tokenizer`. Compiled in the caller's thread.
            place: queue slot from `reserve`; None reserves one now.
            logprobs: number of alternatives per token in `Step.logprobs`, of the model's own logits; None for none.
            prompt_logprobs: the same for `Handle.prompt_logprobs`; feeds the whole prompt, cached or not.
            stop_texts: texts that end the answer, cut from `Step.texts` and `Handle.text`; [] for the text alone.
            tokenizer: for `stop_texts`, `prediction`, `grammar`, and `stop_strings` of `model.generate`.
            skip_special_tokens: True to leave special tokens out of the text.
            scope: tenant name; cached prefixes are shared within a scope.
            client: client name; clients are served round robin. None for `scope`.
            generate_arguments: those of `model.generate` but beams, streamers and caches; `max_time` begins now.

        Raises:
            InputError: prompt or grammar are invalid, or the text is too long for the engine or the model.
            UnsupportedArgumentError: the arguments cannot be served exactly.
            ConfigError: an argument has the wrong type or range.
            EngineFullError, EngineClosedError: see `reserve`.
            concurrent.futures.CancelledError: `place` was released before the request was prepared.
        """
        text = stop_texts, tokenizer, skip_special_tokens
        given = lookahead, seed, prediction, grammar, logprobs, prompt_logprobs, *text, scope, client, on_step, stats
        return self._add(input_ids, generate_arguments, RequestOptions(*given), place)

    def _add(self, ids: Any, arguments: dict[str, Any], options: RequestOptions, place: QueueSlot | None) -> Handle:
        with self.reserve() if place is None else nullcontext(place) as slot:
            self._scheduler.check_slot(slot)
            plan = None if unwrap(self._model).training else self._plan  # training mode may change what is supported
            return self._scheduler.submit(prepare(self._model, ids, arguments, options=options, plan=plan), slot)

    def reserve(self) -> QueueSlot:
        """Reserve a queue slot before the request is prepared, so that a full queue is noticed at no cost.

        Raises:
            EngineFullError: the queue is full.
            EngineClosedError: the engine was closed, or this process was forked from the engine's.
        """
        return self._scheduler.reserve()

    def snapshot(self) -> EngineSnapshot:
        """Return the engine's state and totals. Never waits for the decoding thread."""
        return self._scheduler.snapshot()

    def current_work(self) -> CurrentWork | None:
        """Return what the decoding thread does at the moment; None while it waits for requests. Never waits for it."""
        return self._scheduler.current_work()

    @property
    def problem(self) -> BaseException | None:
        """The exception that ended the decoding thread and all requests; None if none did."""
        return self._scheduler.problem

    def limit_waiting(self, max_waiting: int) -> None:
        """Set the maximum number of waiting requests from now on; those that wait stay."""
        self._scheduler.max_waiting = max_waiting

    def precision_note(self) -> str:
        """Return why drafts may change the output, and the remedy; empty if they cannot, and at later calls."""
        return precision_note(self._model)

    def forget_texts(self) -> None:
        """Forget what the texts so far have taught about drafting, as after a warm-up with texts of another kind."""
        forget_texts(unwrap(self._model))

    def close(self) -> None:
        """Cancel all requests, free their memory and return. Idempotent.

        Called from `on_step` it returns at once, and the requests end before the next step. In a forked process, which
        has no decoding thread, it has no effect.
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
