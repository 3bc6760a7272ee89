"""Predictions of an MTP layer's outputs: the likeliest tokens, by the model's own language model head.

The head is often several times as large as the layer, so a pass costs mostly that. Where it is, the logits of some
tokens are enough: those that the memory suggests, those of the text, and those that the layer predicted most often of
late. This loses hardly a draft, since a token that is none of these is seldom right.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import nn

from lade.decoding.kernels.layout import CEILING, MTP_WIDTH
from lade.decoding.mtp import Predictions

LEAST_VOCABULARY = 16_384
"""With fewer tokens the whole head costs little more than a part of it."""
HOT_SHARE, RENEW_AFTER = 16, 256
"""The hot list has one of so many tokens of the vocabulary, and is made anew after so many predictions."""
_MOST_ODDS = CEILING + 4.0  # log-odds: a layer may be surer than what the memory can store
_LEAST = 1e-6


class Head:
    """Predictions by the language model head of transformers' `MtpModel`, which scales what it returns.

    With `gathers` the logits of some tokens only are computed; None for that if the vocabulary is large.
    """

    def __init__(self, mtp: Any, gathers: bool | None = None) -> None:
        self._mtp = mtp
        head = mtp.shared_head
        self._weight: torch.Tensor | None = None
        plain = type(head) is nn.Linear and head.bias is None and head.weight.is_floating_point()
        scaled = any(getattr(mtp.config, name, None) for name in ("logits_mup_width_multiplier", "unpadded_vocab_size"))
        if plain and not scaled and (gathers or (gathers is None and len(head.weight) >= LEAST_VOCABULARY)):
            self._weight = head.weight
        self._counts = np.zeros(0 if self._weight is None else len(self._weight), np.int64)
        self._hot, self._rows = torch.empty(0, dtype=torch.long), torch.empty(0)
        self._since = RENEW_AFTER
        self.may_gather = False  # the logits of some tokens alone, before there is a hot list

    def predict(self, states: torch.Tensor, candidates: Collection[int] | None) -> Predictions:
        """Predict what follows the layer's outputs `[E, H]` among these candidates; None to compute the whole head."""
        if candidates is not None and self.may_gather:
            predictions = self._gathered(states, candidates)
        else:
            predictions = _likeliest(self._mtp._project_to_logits(states), None)
        if self._weight is not None:
            self._note(predictions)
        return predictions

    def _gathered(self, states: torch.Tensor, candidates: Collection[int]) -> Predictions:
        assert self._weight is not None
        weight = self._weight
        others = sorted(token for token in set(candidates) if token < len(weight))
        ids = torch.tensor(others, dtype=torch.long, device=weight.device)
        ids = ids[~torch.isin(ids, self._hot)]
        logits = torch.cat([states @ self._rows.T, states @ weight[ids].T], dim=-1)  # [E, hot + others]
        return _likeliest(logits, torch.cat([self._hot, ids]))

    def _note(self, predictions: Predictions) -> None:
        """Count what was predicted; now and then the hot list becomes what was predicted most."""
        assert self._weight is not None
        tokens = predictions.tokens[predictions.tokens >= 0]
        np.add.at(self._counts, tokens, 1)
        self._since += len(predictions.tokens)
        if self._since < RENEW_AFTER:
            return
        most = max(MTP_WIDTH, len(self._counts) // HOT_SHARE)
        best = np.argpartition(-self._counts, most)[:most]
        self._hot = torch.from_numpy(np.sort(best)).to(self._weight.device)
        self._rows = self._weight[self._hot]
        self._since, self.may_gather = 0, True
        self._counts >>= 1


def _likeliest(logits: torch.Tensor, ids: torch.Tensor | None) -> Predictions:
    """The likeliest tokens of logits `[E, V]`; of columns that stand for `ids`, where these are given."""
    chances = logits.float().softmax(-1)
    best, places = chances.topk(min(MTP_WIDTH, chances.shape[-1]))
    odds = best.clamp(_LEAST, 1.0 - _LEAST).logit().clamp(max=_MOST_ODDS)
    tokens = (places if ids is None else ids[places]).int()
    found = torch.cat([tokens, odds.view(torch.int32)], dim=-1).cpu().numpy()  # one copy from a device
    width = tokens.shape[-1]
    wide_tokens = np.full((len(found), MTP_WIDTH), -1, np.int32)
    wide_odds = np.zeros((len(found), MTP_WIDTH))
    wide_tokens[:, :width], wide_odds[:, :width] = found[:, :width], found[:, width:].copy().view(np.float32)
    return Predictions(wide_tokens, wide_odds)
