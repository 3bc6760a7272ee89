"""Lookahead parallelism: each process has the whole model and feeds a part of the tree."""

import os

import pytest
import torch
from processes import in_processes
from split_toys import saved, whole
from test_tensor_parallel import IDS, PAPER, SAMPLED, SMALL, TWO, both, raised
from transformers import MambaConfig, MambaForCausalLM

import lade
from lade import LookaheadConfig, Memory, Stats

MAMBA = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
CASES = {
    "greedy": (IDS, {}, "auto"),
    "sampled": (IDS, SAMPLED, LookaheadConfig(budget=24)),
    "paper": (IDS, {}, LookaheadConfig(7, 5, 7)),
    "penalty": (IDS, {"repetition_penalty": 1.2}, SMALL),
    "batch": (TWO, SAMPLED, "auto"),
    "batch that ends": (TWO, {"eos_token_id": 7, "pad_token_id": 0}, LookaheadConfig(budget=24)),
    "padded": (TWO, {"attention_mask": torch.tensor([[0] * 4 + [1] * 8, [1] * 12])}, SMALL),
    "scores": (IDS, {"return_dict_in_generate": True, "output_scores": True}, SMALL),
    "large": (IDS, {}, LookaheadConfig(budget=128)),
    "beams": (IDS, {"num_beams": 3}, None),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def written(place, cases, rank):
    """What a process gets, and what it should get, by case."""
    reference, model, found = whole(place), lade.parallel(whole(place)), {}
    for name in cases:
        ids, given, lookahead = CASES[name]
        arguments = {"max_new_tokens": 40, "do_sample": False, **given}
        torch.manual_seed(7)
        expected = both(reference.generate(ids, **arguments))
        torch.manual_seed(7 + 100 * rank)
        found[name] = both(lade.generate(model, ids, lookahead=lookahead, **arguments)) == expected
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "mistral-window"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_process_returns_what_one_writes_alone(kind, size, folder):
    place = saved(kind, folder)
    expected = dict.fromkeys(CASES, True)
    assert in_processes(size, lambda rank: written(place, CASES, rank)) == [expected] * size


def steps(place, rank, size):
    """How many steps a text takes, and the mean size of the passes of this process; a long path cannot be cut."""
    model, stats = whole(place), Stats()
    if size > 1:
        lade.parallel(model)
    memory = Memory()
    config = LookaheadConfig(budget=32, memory=memory)
    fed = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for _ in range(2):  # the second time it is in memory, which only the first process has
        lade.generate(model, IDS, max_new_tokens=60, lookahead=config, stats=stats)
    return [stats.steps, sum(fed) / len(fed)]


@pytest.mark.distributed
def test_steps_are_as_many_as_alone_and_passes_smaller(folder):
    place = saved("llama", folder)
    (alone, mean), *_ = in_processes(1, lambda rank: steps(place, rank, 1))
    shared = in_processes(4, lambda rank: steps(place, rank, 4))
    assert shared[0][0] == alone < 100
    assert max(each for _, each in shared) < 0.7 * mean


@pytest.mark.distributed
def test_what_is_not_served_is_refused(folder):
    def refusals(rank):
        model = lade.parallel(whole(saved("llama", folder)))
        beams = raised(lambda: lade.generate(model, IDS, num_beams=2, max_new_tokens=4, lookahead=PAPER))
        engine = raised(lambda: lade.Engine(model))
        recurrent = raised(lambda: lade.parallel(MambaForCausalLM(MAMBA).eval()))
        return [beams, engine, recurrent]

    saved("llama", folder)
    first, second = in_processes(2, refusals)
    assert first == second
    said = ["num_beams", "lade.parallel", "recurrent"]
    assert all(
        name.startswith("Unsupported") and words in text for (name, text), words in zip(first, said, strict=True)
    )
