"""Sampling parameters of a request as arguments of `model.generate`, and OpenAI's penalties."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from pydantic import ValidationError
from transformers import LogitsProcessor

from lade.config import LookaheadConfig
from lade.errors import ConfigError
from lade.server.errors import invalid
from lade.server.schemas import BaseRequest, ChatRequest
from lade.server.serialization import decoded
from lade.server.served_model import ServedModel
from lade.server.settings import MAX_CHOICES


class Penalties(LogitsProcessor):
    """Lower the logits of tokens in the answer: `- frequency * count - presence * (count > 0)`.

    The prompt does not count. Works as any other processor with `model.generate`:

    >>> model.generate(ids, logits_processor=[Penalties(0.5, 0.5, prompt_length=ids.shape[1])], max_new_tokens=20)

    Source: OpenAI's API reference, "Frequency and presence penalties".

    Args:
        presence: penalty of a token that occurs; a negative value is a bonus.
        frequency: penalty per occurrence.
        prompt_length: columns of the prompt, padding included.
    """

    def __init__(self, presence: float, frequency: float, *, prompt_length: int) -> None:
        self._presence, self._frequency, self._prompt_length = presence, frequency, prompt_length
        self._counted = torch.empty(0, 0)  # [B, L], the text whose tokens are in the counts
        self._counts = torch.empty(0, 0)  # [B, V]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        """Return the penalized scores `[B, V]` of a text `[B, L]`."""
        new = input_ids[:, self._first_new(input_ids, scores) :]
        self._counts.scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        self._counted = input_ids.clone()
        return scores - self._frequency * self._counts - self._presence * (self._counts > 0)

    def _first_new(self, input_ids: torch.Tensor, scores: torch.Tensor) -> int:
        """Return the first column not counted yet; the prompt's end if another text was counted."""
        length = self._counted.shape[1]
        same = self._counts.shape == scores.shape and self._counts.device == scores.device
        if same and length >= self._prompt_length and torch.equal(self._counted, input_ids[:, :length]):
            return length
        with torch.inference_mode(False):  # a stream may resume outside of inference mode
            self._counts = torch.zeros_like(scores)
        return self._prompt_length


GREEDY_BELOW = 1e-5  # temperatures below it mean greedy decoding, as division would overflow
SEEDS, _DRAWN_SEEDS = 2**64, 2**32
_LOOKAHEAD_FIELDS = frozenset(field.name for field in fields(LookaheadConfig)) - {"memory", "only", "sources"}
_FROM_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def first_seed(body: BaseRequest) -> int:
    """Return the seed of choice 0; choice k has k more. Negative seeds wrap around as in torch."""
    if body.seed is None:
        return secrets.randbelow(_DRAWN_SEEDS - MAX_CHOICES)
    return body.seed if body.seed >= 0 else SEEDS + body.seed


def with_generation_config(body: ChatRequest) -> ChatRequest:
    """Merge the `generation_config`, which `transformers chat` sends as text; raise `ApiError` if it is invalid."""
    if body.generation_config is None:
        return body
    try:
        given = decoded(body.generation_config)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise invalid("generation_config", "not a JSON object: leave it out")
    found = {name: given[name] for name in _FROM_CONFIG if given.get(name) is not None}
    if given.get("max_new_tokens") is not None:
        found["max_tokens"] = given["max_new_tokens"]
    if given.get("do_sample") is False:
        found["temperature"] = 0.0
    fresh = {name: value for name, value in found.items() if name not in body.model_fields_set}
    return body.model_copy(update=_checked(fresh))


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid("generation_config", f"{name} is not a number: leave it out")
    try:
        checked = BaseRequest.model_validate(values)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise invalid("generation_config", f"{first['loc'][0]}: {first['msg']}") from None
    return {name: getattr(checked, name) for name in values}


def generate_arguments(body: BaseRequest, model: ServedModel, prompt_tokens: int) -> dict[str, Any]:
    """Return the arguments of `model.generate` for a prompt of `prompt_tokens` tokens, images included, but the length.

    Raises:
        ApiError: an id is outside the vocabulary.
    """
    arguments = _sampling(body, model)
    if body.repetition_penalty is not None:
        arguments["repetition_penalty"] = body.repetition_penalty
    if body.presence_penalty or body.frequency_penalty:
        presence, frequency = body.presence_penalty or 0.0, body.frequency_penalty or 0.0
        arguments["logits_processor"] = [Penalties(presence, frequency, prompt_length=prompt_tokens)]
    if body.logit_bias:
        model.check_ids("logit_bias", body.logit_bias)
        # a dictionary, as transformers before 5.23 reject the id 0 in a list of pairs
        arguments["sequence_bias"] = {(token,): float(bias) for token, bias in body.logit_bias.items()}
    ends = [] if body.ignore_eos else model.ends
    if body.ignore_eos or body.stop_token_ids:
        model.check_ids("stop_token_ids", body.stop_token_ids or [])
        arguments["eos_token_id"] = [*ends, *(body.stop_token_ids or [])] or None
    return arguments


def sampling_defaults(model: ServedModel) -> dict[str, Any]:
    """Return the sampling defaults; those of transformers, such as top-k 50, do not apply."""
    return {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **model.sampling}


def _sampling(body: BaseRequest, model: ServedModel) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    requested = {name: value for name, value in given.items() if value is not None}
    values = {**sampling_defaults(model), **requested}
    if values["temperature"] < GREEDY_BELOW:
        return {"do_sample": False}
    return {"do_sample": True, **values, "top_k": max(0, values["top_k"] or 0)}


MAX_FED = 256
"""Largest number of tokens that a request may have fed per pass: all rows of the pass take as long as the largest."""


def lookahead_of(requested: str | Mapping[str, Any] | None) -> LookaheadConfig | str | None:
    """Return the method of a request, "auto" for the server's default; raise `ApiError` for an invalid size."""
    if requested is None or isinstance(requested, str):
        return requested
    for name in sorted(set(requested) - _LOOKAHEAD_FIELDS):
        raise invalid(f"lookahead.{name}", f"unknown field: give one of {', '.join(sorted(_LOOKAHEAD_FIELDS))}")
    try:
        config = LookaheadConfig(**requested)
    except ConfigError as problem:
        raise invalid(f"lookahead.{problem.field}", str(problem)) from None
    if config.budget is not None:
        return replace(config, budget=min(config.budget, MAX_FED))
    fed = 1 + (config.ngram - 1) * (config.window + config.guesses)
    if config.method.name == "lookahead" and fed > MAX_FED:
        why = f"feeds {fed} tokens per token: this server feeds up to {MAX_FED}, so that others do not wait"
        raise invalid("lookahead", f"{why}: give smaller sizes")
    return config
