"""`prediction=`: the expected answer, in all forms in which callers give it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from lade.config import LookaheadConfig
from lade.errors import ConfigError, InputError
from lade.hf.refusals import refuse
from lade.model.prepared import Prepared, vocabulary_of

Prediction: TypeAlias = (
    str | torch.Tensor | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | Sequence[torch.Tensor]
)
"""Text or ids `[L]` for one prompt, or one of these per prompt of a batch."""


def refuse_unused_prediction(prediction: Prediction | None, config: LookaheadConfig | None) -> None:
    """Raise `ConfigError` for a prediction where nothing is drafted."""
    if prediction is not None and config is None:
        raise ConfigError("prediction", "a text", "lookahead=None drafts nothing: leave one of them out")


def prediction_ids(prediction: Prediction | None, tokenizer: Any = None) -> list[list[int]]:
    """Return the ids of each prediction, one per prompt; empty without any.

    Args:
        prediction: predictions as the caller gave them; None for none.
        tokenizer: tokenizer of the model, needed for text.

    Raises:
        InputError: a prediction is neither text nor ids, or text without a tokenizer.
    """
    if prediction is None:
        return []
    if isinstance(prediction, torch.Tensor):
        if prediction.ndim not in (1, 2) or prediction.is_floating_point() or prediction.is_complex():
            found = f"{prediction.dtype} of shape {list(prediction.shape)}"
            raise InputError(f"prediction is {found}: give ids, [L] or [B, L], or text")
        several = prediction.tolist() if prediction.ndim == 2 else [prediction.tolist()]
    elif isinstance(prediction, str):
        several = [prediction]
    elif isinstance(prediction, Mapping) or not isinstance(prediction, Sequence):
        raise InputError(f"prediction is of type {type(prediction).__name__}: give text, or ids, or one per prompt")
    else:
        several = [prediction] if all(_is_id(token) for token in prediction) else list(prediction)
    return [_ids_of(one, tokenizer) for one in several]


def _ids_of(one: Any, tokenizer: Any) -> list[int]:
    if isinstance(one, str):
        if tokenizer is None:
            raise InputError("prediction is text, which takes a tokenizer: give tokenizer=..., or its ids")
        one = tokenizer(one, add_special_tokens=False)["input_ids"]
    ids = one.tolist() if isinstance(one, torch.Tensor) else one
    if not isinstance(ids, Sequence) or not all(_is_id(token) for token in ids):
        raise InputError(f"prediction has {one!r:.60}: give text or ids, one per prompt")
    return list(ids)


def _is_id(token: object) -> bool:
    return isinstance(token, int) and not isinstance(token, bool)


def predictions_by_row(prepared: Prepared, config: LookaheadConfig, rows: int) -> list[Sequence[int] | None]:
    """Return the prediction of each row, `[B]`; None where there is none.

    Args:
        prepared: inputs prepared by `model.generate`.
        config: the method and its sizes.
        rows: B, the number of rows.

    Raises:
        InputError: the number of predictions differs from that of prompts, or they have ids outside the vocabulary.
        UnsupportedArgumentError: the method drafts from no text.
    """
    texts, repeated = prepared.predictions, prepared.generation_config.num_return_sequences or 1
    if not texts:
        return [None] * rows
    if not config.adaptive and not config.guesses:
        refuse("prediction with guesses=0", "nothing but the window is drafted then")
    if len(texts) * repeated != rows:
        raise InputError(
            f"prediction has {len(texts)} texts for {rows // repeated} prompts: give one per prompt, which may be empty"
        )
    vocabulary = vocabulary_of(prepared.model)
    for token in (token for text in texts for token in text):
        if not 0 <= token < vocabulary:
            raise InputError(f"prediction has the id {token}, and the model has a vocabulary of {vocabulary}")
    return [text for text in texts for _ in range(repeated)]
