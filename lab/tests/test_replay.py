"""Replays write the recorded text, by every method; edits come in both forms."""

import random

import pytest
import torch
from bench_toys import experiment
from transformers import LlamaConfig, LlamaForCausalLM

import lade
from lade.testing import toy_model
from lade_lab.replay import recorded, replay, table, windowed

VOCABULARY = 64
PROMPT = random.Random(0).choices(range(VOCABULARY), k=30)
ANSWER = [*PROMPT[3:20], 5, *PROMPT[8:28], 7, 9]


@pytest.fixture
def edits(monkeypatch):
    return experiment(monkeypatch, "edits")


@pytest.mark.parametrize("peer", [lade.peers.PromptLookup, lade.peers.Suffix])
def test_a_recorded_text_is_decoded_in_fewer_steps_where_it_copies(peer):
    stats = replay(PROMPT, ANSWER, peer(8), VOCABULARY)
    assert stats.new_tokens == len(ANSWER) and stats.tokens_per_step > 2
    noise = random.Random(1).choices(range(VOCABULARY), k=40)
    assert replay(PROMPT, noise, peer(8), VOCABULARY).tokens_per_step < 1.3


@pytest.mark.parametrize("new", [1, len(ANSWER)])
def test_a_model_writes_the_recorded_text_plainly_and_with_drafts(new):
    model, ids = toy_model("llama", vocabulary=VOCABULARY), torch.tensor([PROMPT])
    text, stats = [*PROMPT, *ANSWER[:new]], lade.Stats()
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False}
    before = model.generate(ids, **arguments)
    with recorded(model, text):
        assert model.generate(ids, **arguments)[0].tolist() == text
        config = lade.LookaheadConfig(budget=8)
        assert lade.generate(model, ids, lookahead=config, stats=stats, **arguments)[0].tolist() == text
    assert torch.equal(model.generate(ids, **arguments), before), "the model is as it was"
    assert new == 1 or stats.tokens_per_step > 2


def test_a_llama_with_a_window_is_the_same_model_within_it(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, **sizes))
    llama.save_pretrained(tmp_path)
    ids = torch.tensor([PROMPT])
    assert torch.allclose(windowed(llama)(ids).logits, llama.eval()(ids).logits, atol=1e-6)


def test_edits_come_whole_or_in_blocks_and_all_methods_write_them(edits):
    before, after = "a\nb\nc\nd\ne\nf\n", "a\nb\nX\nd\ne\nf\n"
    assert edits.whole_file(before, after) == f"```python\n{after}\n```"
    block = "<<<<<<< SEARCH\nb\nc\nd\n=======\nb\nX\nd\n>>>>>>> REPLACE\n"
    assert edits.search_replace(before, after) == block
    assert edits.search_replace(before, before) == ""
    model = toy_model("llama", vocabulary=VOCABULARY)
    edit = edits.Edit(PROMPT, PROMPT[3:28], ANSWER)
    rows = edits.summary(edits.replayed([edit, edit], lambda: model))
    assert len(rows) == len(edits.SIZES) * len(edits.METHODS)
    assert all(row["tokens"] == 2 * len(ANSWER) and row["tasks"] == 2 for row in rows)
    assert {row["best in"] for row in rows} >= {2}


def test_a_table_has_two_decimals():
    assert table(["a", "b"], [{"a": 1.0, "b": 3}, {"a": "x"}]).splitlines()[2:] == ["| 1.00 | 3 |", "| x |  |"]


@pytest.fixture
def agents(monkeypatch):
    return experiment(monkeypatch, "agents")


CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "order 17?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": "order 17: sent"},
    {"role": "assistant", "content": "order 17: sent"},
]


def byte_ids(text):
    return [byte % VOCABULARY for byte in text.encode()]


def repeated(agents):
    """Two runs of the same conversation, and a model for them."""
    runs = [list(agents.turns(CONVERSATION, byte_ids))] * 2
    return runs, toy_model("llama", vocabulary=VOCABULARY, dtype=torch.float32)


def test_turns_begin_with_the_ones_before_and_have_their_tool_calls(agents):
    first, second = agents.turns(CONVERSATION, byte_ids)
    assert (first.number, second.number) == (1, 2)
    assert first.answer == byte_ids('<tool_call>{"arguments": "{}", "name": "f"}</tool_call><|end|>\n')
    assert second.prompt[: len(first.prompt) + len(first.answer)] == first.prompt + first.answer
    assert agents.text_of({"tool_calls": "[{'function': {'name': 'g'}}]"}) == '<tool_call>{"name": "g"}</tool_call>'


def test_all_methods_write_the_turns_and_prefixes_are_reused(agents):
    runs, model = repeated(agents)
    tokens = sum(len(turn.answer) for run in runs for turn in run)
    for name in agents.METHODS:
        if name.startswith("server"):  # see test_evidence.py
            continue
        if name.startswith("adaptive"):
            counts = list(agents.by_engine(agents.Way("kept" in name, "answers" in name), 8, runs, model))
            assert counts[1].cached_tokens > 0.5 * counts[1].prompt_tokens
        else:
            counts = list(agents.by_peer(name, 8, runs, VOCABULARY))
        row = agents.summary(counts)
        assert row["tokens"] == tokens and row["turns"] == 4
        first, last = counts[0].stats.tokens_per_step, counts[2].stats.tokens_per_step
        assert "kept" not in name or last > 2 * first, "the second run's calls are known from the first"


def test_times_to_the_first_token_are_told_by_turn_with_and_without_a_prefix_cache(agents):
    prompts, fresh, *times = agents.first_tokens(8, *repeated(agents))
    assert set(prompts) == {"", "all", "turn 1", "turn 2"}
    assert prompts["turn 1"] < prompts["turn 2"] and fresh["turn 2"] < prompts["turn 2"]
    assert ["without" in row[""] for row in times] == [False, True]
    assert all(row["turn 2"] > 0 for row in times)
