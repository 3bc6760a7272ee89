"""What is read of the logits: the argmax as plain decoding finds it, and the likeliest tokens with their log-odds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memories import unpacked

from lade.decoding import readout as module
from lade.decoding.kernels.layout import BITS, CEILING, FLOOR, SCALE, TOKEN, WIDTH, Ints
from lade.decoding.readout import Readout, read

VOCABULARIES = (1, 2, 3, 6, 7, 63, 64, 65, 384, 385, 400, 1000, 4096, 4097)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BLOCK = 64


def read_here(logits: torch.Tensor) -> tuple[list[int], Ints]:
    said = read(logits)
    assert said.entries is not None and said.choices is None
    assert read(logits, wants_entries=False) == Readout(said.argmax_ids)
    return said.argmax_ids, said.entries


def read_from_afar(logits: torch.Tensor) -> tuple[list[int], Ints]:
    """As logits on another device are read."""
    said = module._read_on_device(logits, None, wants_entries=True)
    assert said.entries is not None and said.choices is None
    assert module._read_on_device(logits, None, wants_entries=False) == Readout(said.argmax_ids)
    return said.argmax_ids, said.entries


READERS = (read_here, read_from_afar)
readers = pytest.mark.parametrize("read", READERS, ids=["here", "afar"])


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def split(entries: Ints, vocabulary: int) -> tuple[Ints, Ints]:
    """Tokens and values `[M, K]` of what there is."""
    count = min(WIDTH, vocabulary)
    assert entries.dtype == np.int32 and entries.flags.c_contiguous
    assert (entries[:, count:] == TOKEN).all(), "there are no more tokens"
    for row in entries:
        assert len(unpacked(row)) == count
    return entries[:, :count] & TOKEN, entries[:, :count] >> BITS


@readers
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("rows", (0, 1, 5))
def test_the_likeliest_tokens_are_those_of_topk_in_their_order(read, rows, vocabulary):
    shuffled = [torch.randperm(vocabulary) for _ in range(rows)]
    logits = torch.stack(shuffled) / 16 if rows else torch.zeros(0, vocabulary)  # no ties
    picks, entries = read(logits)
    assert entries.shape == (rows, WIDTH)
    tokens, _ = split(entries, vocabulary)
    assert tokens.tolist() == logits.topk(min(WIDTH, vocabulary)).indices.tolist()
    assert picks == logits.argmax(-1).tolist()


@pytest.mark.one_in(2)
@readers
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_picks_are_the_argmax_where_tokens_tie(read, vocabulary, dtype):
    """Coarse dtypes have many equal logits; of equal ones plain decoding takes the first."""
    logits = (logits_of(40, vocabulary) / 8).round().to(dtype)
    picks, entries = read(logits)
    assert picks == logits.argmax(-1).tolist()
    tokens, _ = split(entries, vocabulary)
    scores = logits.gather(1, torch.from_numpy(tokens).long())
    assert torch.equal(scores, logits.topk(min(WIDTH, vocabulary)).values)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_of_equal_tokens_the_first_ones_are_kept(vocabulary):
    """Where all is on this device."""
    picks, entries = read_here(torch.full((3, vocabulary), -2.5, dtype=torch.bfloat16))
    assert picks == [0, 0, 0]
    tokens, values = split(entries, vocabulary)
    assert (values == values[0, 0]).all()
    if vocabulary <= BLOCK:
        assert tokens.tolist() == [list(range(min(WIDTH, vocabulary)))] * 3
    logits = (logits_of(40, vocabulary) / 8).round()
    tokens, _ = split(read_here(logits)[1], vocabulary)
    best = logits == logits.amax(1, keepdim=True)
    for row, equal in zip(tokens.tolist(), best, strict=True):
        first = equal.nonzero()[:, 0].tolist()
        assert sorted(row[: min(len(first), len(row))]) == row[: min(len(first), len(row))], "in their order"
        assert row[0] == first[0]


@readers
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", (1, 2, 8, 70, 1000))
@pytest.mark.filterwarnings("error")
def test_picks_are_the_argmax_where_logits_are_no_numbers(read, vocabulary, dtype):
    """NaN is the largest of all for torch; infinities are compared as usual."""
    odd, rng = [math.nan, math.inf, -math.inf, -0.0, 0.0, -math.nan], np.random.default_rng(0)
    logits = logits_of(200, vocabulary).numpy()
    for row, count in enumerate(rng.integers(0, 2 * WIDTH, 200)):
        logits[row, rng.integers(0, vocabulary, count)] = rng.choice(odd[: 1 + row % len(odd)], count)
    logits[: len(odd)] = np.array(odd)[:, None]
    given = torch.from_numpy(logits).to(dtype)
    picks, entries = read(given)
    assert picks == given.argmax(-1).tolist()
    assert (entries >= 0).all() and (entries >> BITS <= 255).all()
    tokens = entries & TOKEN
    assert ((tokens < vocabulary) | (tokens == TOKEN)).all()
    assert all(len(set(row)) == len(row) for row in (tokens[:, : min(WIDTH, vocabulary)]).tolist())


@readers
def test_float64_rows_are_read_as_float32(read):
    logits = torch.zeros(1, 500, dtype=torch.float64)
    logits[0, 300], logits[0, 20] = 1.0 + 1e-12, 1.0
    assert read(logits)[0] == [20]


@readers
@pytest.mark.parametrize("vocabulary", (8, 70, 1000))
@pytest.mark.parametrize("allowed", (1, 2, 5))
@pytest.mark.filterwarnings("error")
def test_forbidden_tokens_are_never_likely(read, vocabulary, allowed):
    logits = torch.full((2, vocabulary), -torch.inf)
    logits[:, -allowed:] = torch.arange(allowed) / 4
    picks, entries = read(logits)
    tokens, values = split(entries, vocabulary)
    assert picks == [vocabulary - 1] * 2
    assert tokens[:, :allowed].tolist() == [list(range(vocabulary - 1, vocabulary - 1 - allowed, -1))] * 2
    assert (values[:, allowed:] == 0).all() and (values[:, 0] > 0).all()


@readers
@given(st.integers(1, 700), st.floats(0.1, 12), st.integers(0, 2**31))
def test_values_are_log_odds_relative_to_the_sum_over_the_best_of_each_64(read, vocabulary, spread, seed):
    """In float64, rounded to the nearest unit. On the CPU what is far below the best adds nothing."""
    logits = spread * torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(seed))
    tokens, values = split(read(logits)[1], vocabulary)
    scores = logits.double().gather(1, torch.from_numpy(tokens).long()).numpy()
    best = scores[:, :1]
    parts = [part.double().amax(1).numpy() for part in logits.split(BLOCK, dim=1)]
    weights = np.exp(scores - best)
    least, rounding = (-np.inf, 0.01) if read is read_from_afar else (-12, 1e-5)  # elsewhere sums are in float32
    total = sum(np.exp(part - best[:, 0]) * (part - best[:, 0] > least) for part in parts)[:, None]
    odds = np.log(np.maximum(weights, 1e-9) / np.maximum(total - weights, 1e-9))
    exact = np.clip((odds - FLOOR) / SCALE, 0, 255)
    assert np.abs(values - exact).max() <= 0.5 + rounding


@readers
def test_values_of_a_large_vocabulary_leave_little_out(read):
    logits = logits_of(20, 4096) * 1.5
    tokens, values = split(read(logits)[1], 4096)
    odds = torch.logit(logits.double().softmax(-1).gather(1, torch.from_numpy(tokens).long())).numpy()
    error = FLOOR + SCALE * values - np.clip(odds, FLOOR, CEILING)
    assert (error > -SCALE).all() and error.max() < 1.5


@pytest.mark.parametrize("vocabulary", (6, 64, 100, 1000))
def test_logits_may_lie_anyhow_in_memory(vocabulary):
    logits = logits_of(6, vocabulary)
    wide = torch.zeros(12, 2 * vocabulary)
    wide[::2, ::2] = logits
    expected = read_here(logits)
    for odd in (logits.t().contiguous().t(), wide[::2, ::2], torch.stack([logits] * 2, dim=2)[..., 1]):
        assert not odd.is_contiguous()
        picks, entries = read_here(odd)
        assert picks == expected[0] and np.array_equal(entries, expected[1])


def test_tokens_that_do_not_fit_into_an_entry_are_left_out():
    """They are picked all the same."""
    logits = torch.zeros(1, TOKEN + 4)
    for place, token in enumerate((TOKEN + 3, TOKEN - 1, TOKEN, 5)):
        logits[0, token] = 9.0 - place
    for reader in READERS:
        picks, entries = reader(logits)
        assert picks == [TOKEN + 3]
        assert list(unpacked(entries[0]))[:2] == [TOKEN - 1, 5]
        assert (entries >> BITS <= 255).all() and len(unpacked(entries[0])) == WIDTH - 2


@pytest.mark.parametrize("wants_entries", [True, False])
@pytest.mark.parametrize("reader", [read, module._read_on_device], ids=["here", "afar"])
def test_choices_come_along_and_no_logits_change(reader, wants_entries):
    logits, choices = logits_of(6, 100), torch.tensor([99, -1, 0, 3, 2, 1])
    said = reader(logits, choices, wants_entries=wants_entries)
    assert torch.equal(logits, logits_of(6, 100))
    assert said.choices == choices.tolist() and said.argmax_ids == logits.argmax(-1).tolist()
    assert (said.entries is not None) == wants_entries
    if wants_entries:
        assert np.array_equal(said.entries, read_here(logits)[1]) and said.entries.flags.c_contiguous


def test_rows_have_parts_of_it():
    entries = np.arange(36, dtype=np.int32).reshape(6, 6)
    whole = Readout([1, 2, 3, 4, 5, 6], entries, [7, 8, 9, 10, 11, 12])
    part = whole.rows(3, 2)
    assert part.argmax_ids == [4, 5] and part.choices == [10, 11]
    assert np.array_equal(part.entries, entries[3:5]) and part.entries.flags.c_contiguous
    assert Readout([1, 2]).rows(1, 1) == Readout([2])
