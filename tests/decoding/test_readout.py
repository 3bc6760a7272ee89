"""What is read of the logits: the argmax as plain decoding finds it, and the likeliest tokens with their log-odds."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lade.decoding.readout import CEILING, FLOOR, SCALE, best_tokens, read

VOCABULARIES = (2, 3, 6, 7, 63, 384, 385, 400, 1000, 4096, 4097)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("rows", (1, 5))
@pytest.mark.parametrize("width", (1, 6))
def test_the_likeliest_tokens_are_those_of_topk_in_their_order(rows, vocabulary, width):
    logits = torch.stack([torch.randperm(vocabulary) for _ in range(rows)]) / 16  # no ties
    picks, readout = read(logits, width)
    assert readout.tokens.tolist() == logits.topk(min(width, vocabulary)).indices.tolist()
    assert picks == logits.argmax(-1).tolist()
    assert readout.tokens.dtype == np.int32 and readout.values.dtype == np.uint8


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_picks_are_the_argmax_where_tokens_tie(vocabulary, dtype):
    """Coarse dtypes have many equal logits; of equal ones plain decoding takes the first."""
    logits = (logits_of(40, vocabulary) / 8).round().to(dtype)
    picks, readout = read(logits, 6)
    assert picks == logits.argmax(-1).tolist() == best_tokens(logits[None])[0]
    scores = logits.gather(1, torch.from_numpy(readout.tokens).long())
    assert torch.equal(scores, logits.topk(min(6, vocabulary)).values)
    assert all(len(set(row)) == len(row) for row in readout.tokens.tolist())


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_constant_rows_pick_the_first_token(vocabulary):
    picks, readout = read(torch.full((3, vocabulary), -2.5, dtype=torch.bfloat16), 6)
    assert picks == [0, 0, 0]
    assert (readout.values == readout.values[0, 0]).all()


def test_float64_rows_are_read_as_float32():
    logits = torch.zeros(1, 500, dtype=torch.float64)
    logits[0, 300], logits[0, 20] = 1.0 + 1e-12, 1.0
    assert read(logits, 6)[0] == best_tokens(logits[None])[0] == [20]


@pytest.mark.parametrize("vocabulary", (8, 70, 1000))
@pytest.mark.parametrize("allowed", (1, 2, 5))
@pytest.mark.filterwarnings("error")
def test_forbidden_tokens_are_never_likely(vocabulary, allowed):
    logits = torch.full((2, vocabulary), -torch.inf)
    logits[:, -allowed:] = torch.arange(allowed) / 4
    picks, readout = read(logits, 6)
    assert picks == [vocabulary - 1] * 2
    assert readout.tokens[:, :allowed].tolist() == [list(range(vocabulary - 1, vocabulary - 1 - allowed, -1))] * 2
    assert (readout.values[:, allowed:] == 0).all()


@given(st.integers(2, 383), st.floats(0.1, 12), st.integers(0, 2**31))
def test_values_are_the_log_odds_to_within_a_unit_where_the_sum_is_over_all(vocabulary, spread, seed):
    logits = spread * torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(seed))
    _, readout = read(logits, 6)
    likelihoods = logits.double().softmax(-1).gather(1, torch.from_numpy(readout.tokens).long())
    odds = torch.logit(likelihoods, eps=1e-12).clamp(FLOOR, CEILING).numpy()
    assert np.abs(FLOOR + SCALE * readout.values - odds).max() < SCALE
    assert (np.diff(readout.values.astype(int), axis=1) <= 0).all()


def test_values_of_a_large_vocabulary_leave_little_out():
    logits = logits_of(20, 4096) * 1.5
    _, readout = read(logits, 6)
    odds = torch.logit(logits.double().softmax(-1).gather(1, torch.from_numpy(readout.tokens).long())).numpy()
    error = FLOOR + SCALE * readout.values - np.clip(odds, FLOOR, CEILING)
    assert (error > -SCALE).all() and error.max() < 1.5
    assert (np.diff(readout.values.astype(int), axis=1) <= 0).all()


def test_some_rows_of_a_readout():
    _, readout = read(logits_of(5, 100), 6)
    assert readout[1:3].tokens.tolist() == readout.tokens[1:3].tolist()
    assert readout[1:3].values.tolist() == readout.values[1:3].tolist()
