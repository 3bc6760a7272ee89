"""Runnable methods of a benchmark, and their completions."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from lade.config import LookaheadConfig
from lade.drafter import Drafter
from lade.errors import UnsupportedModelError
from lade.hf.call import original_generate
from lade.hf.session import Session
from lade.memory import Memory
from lade.model.facts import CACHE
from lade.model.prepared import custom_generate_for
from lade.model.supports import supports
from lade.serving.request import PLAIN
from lade.stats import Stats, Step
from lade_lab import results
from lade_lab.harness.methods import PEERS, TRANSFORMERS, load_drafter
from lade_lab.mtp_chain import MtpChainDrafter
from lade_lab.results import Method, Sample, Settings
from lade_lab.workloads import distinct_ngrams


@dataclass(frozen=True)
class Place:
    """Which answer: the name of the workload, the id of the item in it, turn of a conversation, seed and repetition."""

    workload: str
    prompt: str
    turn: int
    seed: int
    repeat: int


@dataclass(frozen=True)
class Completion:
    """One answer to one prompt; its steps begin with prefill, and are none for transformers' own methods."""

    tokens: list[int]
    seconds: float
    stats: Stats
    steps: list[Step] = field(default_factory=list)

    def sample(self, place: Place, method: str, prompt: Sequence[int]) -> Sample:
        """The record of it."""
        stats = self.stats
        return Sample(
            workload=place.workload,
            prompt=place.prompt,
            turn=place.turn,
            prompt_sha256=digest(prompt),
            prompt_tokens=len(prompt),
            method=method,
            seed=place.seed,
            repeat=place.repeat,
            new_tokens=len(self.tokens),
            seconds=self.seconds,
            prefill_s=stats.prefill_s,
            decode_s=stats.decode_s,
            forward_s=stats.forward_s,
            steps=stats.steps,
            step_tokens=[step.fed for step in self.steps[1:]] if self.steps else list(stats.step_tokens),
            accepted=[len(step.tokens) for step in self.steps[1:]] if self.steps else list(stats.accepted),
            sources=sources_by_place(self.steps[1:]),
            distinct_4grams=distinct_ngrams(self.tokens),
            output_sha256=digest(self.tokens),
        )


def sources_by_place(steps: Sequence[Step]) -> list[dict[str, int]]:
    """For each place in a step, 0 being after the root: who proposed the tokens emitted there, and how many."""
    counts: list[Counter[str]] = [Counter() for _ in range(max((len(step.tokens) for step in steps), default=0))]
    for step in steps:
        for place, source in enumerate(step.sources):
            counts[place][source] += 1
    return [dict(count) for count in counts]


def digest(ids: Sequence[int]) -> str:
    """The SHA-256 of ids as little-endian int64, in hexadecimal."""
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()


@dataclass
class Pass:
    """One forward pass: tokens in the cache before it, tokens fed, and when it began and ended."""

    cached: int
    fed: int
    start: float
    end: float = 0.0


class Meter:
    """While it is entered, it notes the passes of one model; a draft model that runs meanwhile is another.

    >>> with Meter(model) as meter:
    ...     output = model.generate(ids, max_new_tokens=20)
    >>> meter.stats(prompt_tokens=ids.shape[1], new_tokens=output.shape[1] - ids.shape[1])

    On a GPU a pass ends for it when it has been launched, so `forward_s` then says little; the sums of times are right.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._hooks: list[Any] = []
        self.passes: list[Pass] = []
        self.begin = self.end = 0.0

    def __enter__(self) -> Meter:
        self._hooks = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after),
        ]
        self.begin = perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end = perf_counter()
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: Any, args: Any, kwargs: Any) -> None:
        ids, cache = kwargs.get("input_ids", args[0] if args else None), kwargs.get(CACHE)
        fed = 1 if ids is None else ids.shape[-1]
        self.passes.append(Pass(0 if cache is None else cache.get_seq_length(), fed, perf_counter()))

    def _after(self, module: Any, args: Any, output: Any) -> None:
        self.passes[-1].end = perf_counter()

    def stats(self, prompt_tokens: int, new_tokens: int) -> Stats:
        """The figures of one generation.

        A pass that begins before the end of the prompt belongs to prefill. Of what a later pass emits the cache tells:
        it grows by just that until the next one. Where a method checks guesses in prefill already, as transformers'
        assisted ones do, `sum(accepted)` is less than `new_tokens - 1`.
        """
        steps = [each for each in self.passes if each.cached >= prompt_tokens]
        starts = [each.start for each in steps] + [self.end]  # a step ends where the next one begins
        lengths = [each.cached for each in steps] + [prompt_tokens + new_tokens - 1]
        stats, emitted = Stats(), [after - before for before, after in pairwise(lengths)]
        stats.add(_step(0, new_tokens - sum(emitted), prompt_tokens, starts[0] - self.begin))
        for index, (each, tokens) in enumerate(zip(steps, emitted, strict=True), start=1):
            seconds = starts[index] - starts[index - 1]
            stats.add(_step(index, tokens, each.fed, seconds), forward_s=each.end - each.start)
        return stats


def _step(index: int, tokens: int, fed: int, seconds: float) -> Step:
    """A step of a method that drafts one token after the other: all it emits was drafted, but for the last token."""
    sources = ["draft"] * (tokens - 1) + ["bonus"] * min(tokens, 1)
    return Step(index, [-1] * tokens, sources, fed, seconds)


@dataclass(frozen=True)
class Models:
    """The models under test.

    Attributes:
        record: of the model.
        plain: the model as transformers runs it.
        packed: a copy with prepacked weights for this library's methods; None: they run on the plain one.
        draft: the model that `hf-assisted` drafts with.
    """

    record: results.Model
    plain: PreTrainedModel
    packed: PreTrainedModel | None = None
    draft: PreTrainedModel | None = None


class Arm(Protocol):
    """A method, ready to answer. Its memory is what it keeps from one prompt to the next."""

    method: Method
    memory: Memory | None

    def complete(self, prompt: Sequence[int], seed: int, new_tokens: int) -> Completion:
        """Continue a prompt by so many tokens at most; torch's generators are afterwards as they were."""
        ...


class TransformersArm:
    """`model.generate`, with or without a draft; see `Arm`."""

    memory: Memory | None = None

    def __init__(
        self, method: Method, model: PreTrainedModel, arguments: dict[str, Any], draft: PreTrainedModel | None = None
    ) -> None:
        self.method = method
        self._model: Any = model
        self._arguments = {**arguments, **method.config}
        if method.kind == "hf-assisted":
            self._arguments["assistant_model"] = draft

    def complete(self, prompt: Sequence[int], seed: int, new_tokens: int) -> Completion:
        """See `Arm`."""
        inputs: Any = inputs_of(prompt, self._model)
        with seeded(seed, self._model), Meter(self._model) as meter, original_generate(self._model) as generate:
            output: Any = generate(**inputs, **self._arguments, max_new_tokens=new_tokens)
            tokens: list[int] = output[0, len(prompt) :].tolist()  # waits for the device
        return Completion(tokens, meter.end - meter.begin, meter.stats(len(prompt), len(tokens)))


class OwnArm:
    """One of this library's methods; see `Arm`."""

    def __init__(self, method: Method, model: PreTrainedModel, arguments: dict[str, Any]) -> None:
        self.method, self._arguments = method, arguments
        self._model: Any = model
        self.memory: Memory | None = Memory() if method.kind == "adaptive-warm" else None
        self._sources: list[Drafter] = []
        if method.kind == "drafter":
            self._sources = [load_drafter(method.config["drafter"])]
        elif method.kind in PEERS:
            self._sources = [PEERS[method.kind](**method.config)]

    def complete(self, prompt: Sequence[int], seed: int, new_tokens: int) -> Completion:
        """See `Arm`."""
        stats = Stats()
        chain = MtpChainDrafter(**self.method.config) if self.method.kind == "mtp" else None
        make = functools.partial(Session, config=self._config(), stats=stats, drafter=chain)
        inputs: Any = inputs_of(prompt, self._model)
        with seeded(seed, self._model):
            start = perf_counter()
            session: Any = self._model.generate(
                **inputs, **self._arguments, max_new_tokens=new_tokens, custom_generate=custom_generate_for(make)
            )
            steps: list[Step] = list(session)
            seconds = perf_counter() - start
        stats.prefill_s = seconds - stats.decode_s  # what `model.generate` prepares included, as for its own methods
        return Completion([token for step in steps for token in step.tokens], seconds, stats, steps)

    def _config(self) -> LookaheadConfig:
        match self.method.kind:
            case "lookahead":
                return LookaheadConfig(**self.method.config, adaptive=False)
            case "adaptive" | "adaptive-warm":
                return LookaheadConfig(**self.method.config, adaptive=True, memory=self.memory)
            case "drafter":
                return LookaheadConfig(budget=self.method.config["budget"], sources=self._sources)
        return LookaheadConfig(sources=self._sources, only=True) if self._sources else PLAIN


def arms_for(methods: Sequence[Method], models: Models, settings: Settings) -> list[Arm]:
    """Each method with the weights it runs on, which is noted in its record.

    Raises:
        UnsupportedModelError: this library's methods cannot be run with the model.
    """
    own = [method.name for method in methods if method.kind not in TRANSFORMERS]
    support = supports(models.packed or models.plain)
    if own and not support:
        raise UnsupportedModelError(str(support), f"leave out {', '.join(own)}")
    arguments, arms = generate_arguments(settings), list[Arm]()
    for method in methods:
        if method.kind in TRANSFORMERS:
            arms.append(TransformersArm(method, models.plain, arguments, models.draft))
        else:
            packed = models.packed is not None
            arms.append(OwnArm(replace(method, packed=packed), models.packed or models.plain, arguments))
    return arms


def generate_arguments(settings: Settings) -> dict[str, Any]:
    """Arguments of `model.generate` for choosing tokens; the model's penalties and stop tokens stay."""
    arguments: dict[str, Any] = {"do_sample": settings.temperature is not None, "num_beams": 1}
    if settings.temperature is not None:
        arguments |= {"temperature": settings.temperature, "top_k": settings.top_k or 0, "top_p": settings.top_p or 1.0}
    if settings.ignore_eos:
        arguments["eos_token_id"] = None
    return arguments


def inputs_of(prompt: Sequence[int], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A prompt as `model.generate` takes it: ids and mask, `[1, L]`."""
    ids = torch.tensor([list(prompt)], device=model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextmanager
def seeded(seed: int, model: PreTrainedModel) -> Iterator[None]:
    """Run the body with torch's generators seeded; their states are restored afterwards."""
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
