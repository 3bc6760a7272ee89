"""The methods made ready to answer, each on its own weights: transformers' own, and this library's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from lade.bench import results
from lade.bench.harness.completion import Completion
from lade.bench.harness.methods import TRANSFORMERS
from lade.bench.harness.pass_counter import Meter
from lade.bench.peers.prompt_lookup import PromptLookupDrafter
from lade.bench.peers.suffix import SuffixDrafter
from lade.bench.peers.token_recycling import TokenRecyclingDrafter
from lade.bench.results import Method, Settings
from lade.config import LookaheadConfig
from lade.decoding.drafting.drafter import Drafter
from lade.decoding.drafting.jacobi import JacobiDrafter
from lade.errors import UnsupportedModelError
from lade.hf.original import original_generate
from lade.hf.prepared import preparing
from lade.hf.session import Session
from lade.memory import Memory
from lade.model.support.supports import supports
from lade.serving.extras import PLAIN
from lade.stats import Stats, Step

_DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "jacobi": JacobiDrafter,
    "prompt-lookup": PromptLookupDrafter,
    "suffix": SuffixDrafter,
    "token-recycling": TokenRecyclingDrafter,
}
"""Methods that no config describes."""


@dataclass(frozen=True)
class Models:
    """What answers.

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
    """A method, ready to answer.

    Attributes:
        method: the record of it.
        memory: what it keeps from one prompt to the next; None for a method that keeps nothing.
    """

    method: Method
    memory: Memory | None

    def complete(self, prompt: Sequence[int], seed: int, new_tokens: int) -> Completion:
        """Continue a prompt.

        Args:
            prompt: ids.
            seed: of torch's generators, which afterwards are as they were.
            new_tokens: at most this many.
        """
        ...


class TransformersArm:
    """`model.generate`, with or without a draft; see `Arm`.

    Args:
        method: of a kind in `TRANSFORMERS`.
        model: the model.
        arguments: of `model.generate`.
        draft: for `hf-assisted`.
    """

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
    """One of this library's methods; see `Arm`.

    Args:
        method: of a kind that is not in `TRANSFORMERS`.
        model: packed or not.
        arguments: of `model.generate`.
    """

    def __init__(self, method: Method, model: PreTrainedModel, arguments: dict[str, Any]) -> None:
        self.method, self._arguments = method, arguments
        self._model: Any = model
        self.memory: Memory | None = Memory() if method.kind == "adaptive-warm" else None

    def complete(self, prompt: Sequence[int], seed: int, new_tokens: int) -> Completion:
        """See `Arm`."""
        stats = Stats()
        make = functools.partial(Session, config=self._config(), stats=stats, drafter=self._drafter())
        inputs: Any = inputs_of(prompt, self._model)
        with seeded(seed, self._model):
            start = perf_counter()
            session: Any = self._model.generate(
                **inputs, **self._arguments, max_new_tokens=new_tokens, custom_generate=preparing(make)
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
        return PLAIN

    def _drafter(self) -> Drafter | None:
        make = _DRAFTERS.get(self.method.kind)
        return None if make is None else make(**self.method.config)


def arms_for(methods: Sequence[Method], models: Models, settings: Settings) -> list[Arm]:
    """Each method with the weights it runs on, which is noted in its record.

    Args:
        methods: see `lade.bench.harness.methods.parse_all`.
        models: what answers.
        settings: how.

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
