"""What prefill shows of a prompt: the logits of its tokens, in pieces, without asking the model for them."""

import threading
from functools import partial

import pytest
import torch
from inside import hooks_of
from pretend import short_pieces
from small_models import small_model
from spies import watched
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig

import lade
from lade.model.kv_cache import TreeCache
from lade.model.prefill import HiddenStates
from lade.model.runner import EagerRunner
from lade.testing import toy_model

IDS = torch.randint(1, 48, (1, 30), generator=torch.Generator().manual_seed(0))


def shown(model, ids=IDS, cached=0, **arguments):
    """What is shown of prompts, by the number of the token, `[B, T, V]`."""
    runs = EagerRunner(model, lade.supports(model).require(), GenerationConfig(**arguments))
    pieces, cache = {}, TreeCache()

    def hook(same_prompt, start, logits):
        assert same_prompt == [len(pieces.setdefault(start, []))]
        pieces[start].append(logits.clone())

    if cached:
        runs.prefill([ids[0, :cached].tolist()], cache)
    last = runs.prefill(ids.tolist(), cache, hook)
    return {start: torch.stack(rows) for start, rows in pieces.items()}, last


def kept_by(model, ids, **arguments):
    """Bytes of hidden states that are kept when a prompt has been fed."""

    def bytes_of(states, *args):
        tensors = [each for each in tree_leaves(vars(states)) if isinstance(each, torch.Tensor)]
        return sum(each.untyped_storage().nbytes() for each in tensors)

    with pytest.MonkeyPatch.context() as patch:
        found = watched(patch, HiddenStates, "prompt_logits", bytes_of)
        pieces, _ = shown(model, ids, **arguments)
    return found, pieces


close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def said_by(model):
    return model(IDS).logits


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize(("chunk", "cached"), [(None, 0), (7, 0), (None, 20)])
def test_it_is_what_the_model_says_of_a_conversation_only_what_is_new(family, chunk, cached):
    model = toy_model(family)
    pieces, last = shown(model, cached=cached, prefill_chunk_size=chunk)
    assert list(pieces) == [cached]
    close(pieces[cached], said_by(model)[:, cached:])
    close(last, said_by(model)[:, -1])


def test_pieces_are_bounded_and_only_the_last_tokens_are_looked_at(monkeypatch):
    short_pieces(monkeypatch, tokens=20, logits=48 * 8)
    model = toy_model()
    pieces, _ = shown(model)
    assert {start: piece.shape[1] for start, piece in pieces.items()} == {10: 8, 18: 8, 26: 4}
    for start, piece in pieces.items():
        close(piece, said_by(model)[:, start : start + piece.shape[1]])


@pytest.mark.parametrize(("piece", "calls"), [(48 * 30, [1, 30]), (48 * 29, [1, 1, 29, 1])])
def test_the_head_is_read_once_more_for_a_prompt_that_is_one_piece(piece, calls, monkeypatch):
    """Beside the last token of the prefill itself; where there are several pieces, for their scale, too."""
    short_pieces(monkeypatch, logits=piece)
    model, fed = toy_model(), []
    model.get_output_embeddings().register_forward_hook(
        lambda module, args, logits: fed.append(logits.numel() // logits.shape[-1])
    )
    shown(model)
    assert fed == calls


@pytest.mark.parametrize("chunk", [None, 1, 7, 20])
def test_no_more_than_the_last_tokens_are_kept(chunk, monkeypatch):
    short_pieces(monkeypatch, tokens=16)
    model = toy_model()
    kept, pieces = kept_by(model, IDS, prefill_chunk_size=chunk)
    assert kept == [16 * 32 * 8]  # tokens, size of a state, bytes of a float64
    assert [(start, piece.shape[1]) for start, piece in pieces.items()] == [(14, 16)]
    close(pieces[14], said_by(model)[:, 14:])


def test_what_another_thread_feeds_meanwhile_is_not_shown():
    model, other = toy_model(), torch.ones(2, 9, dtype=torch.long)
    here = threading.get_ident()

    def interrupt(module, args):
        if threading.get_ident() == here:
            thread = threading.Thread(target=model, args=[other])
            thread.start()
            thread.join()

    model.get_input_embeddings().register_forward_pre_hook(interrupt)
    pieces, _ = shown(model, prefill_chunk_size=7)
    close(pieces[0], said_by(model))


def test_scaled_logits_are_scaled_and_capped_ones_nearly():
    granite = small_model("granite", logits_scaling=8.0)
    pieces, _ = shown(granite)
    with torch.no_grad():
        torch.testing.assert_close(pieces[0], granite(IDS).logits, rtol=1e-4, atol=1e-4)
    gemma = small_model("gemma2", attention="eager", head_dim=8, final_logit_softcapping=5.0)
    pieces, _ = shown(gemma)
    with torch.no_grad():
        assert torch.equal(pieces[0].argmax(-1), gemma(IDS).logits.argmax(-1))


def test_the_hook_goes_even_when_prefill_fails():
    model = toy_model()
    with pytest.raises(IndexError):
        shown(model, torch.full((1, 5), 1000))
    assert not hooks_of(model)


STATES = torch.ones(1, IDS.shape[1], 32, dtype=torch.float64)


@pytest.mark.parametrize("change", [lambda states: states[0], lambda states: states.float()], ids=["rank", "dtype"])
def test_what_the_head_cannot_read_is_left_alone(change):
    """Between decoder and head lies something else, as in ModernBert's decoder and in Mllama."""
    model = toy_model()
    logits = model(IDS).logits[:, -1]
    for collected, read in ((change(STATES), False), (STATES, True)):
        states = HiddenStates(model)
        states._collect((collected,))
        assert bool(list(states.prompt_logits(logits, IDS.shape[1]))) == read


def test_a_hook_is_told_of_each_prompts_own_tokens(monkeypatch):
    first, second = torch.randn(2, 3, 5), torch.randn(2, 2, 5)
    states = HiddenStates(toy_model())
    monkeypatch.setattr(states, "prompt_logits", lambda logits, length: iter([(0, first), (3, second)]))
    told = []
    states.report(lambda *call: told.append(call), torch.empty(0), 5, [[0, 2], [1]], [0, 4])
    expected = [([0, 2], 0, first[0]), ([0, 2], 3, second[0]), ([1], 0, second[1][1:])]
    assert [call[:2] for call in told] == [call[:2] for call in expected]
    assert all(torch.equal(found[2], wanted[2]) for found, wanted in zip(told, expected, strict=True))
