"""Peers and `LookaheadConfig(only=True)`: plain decoding's tokens, with the drafts of the sources alone or beside."""

import dataclasses

import pytest
import torch
from same_as_plain import assert_same_tokens
from transformers import AutoModelForCausalLM

import lade
from lade import ConfigError, Drafter, LookaheadConfig, Stats, UnsupportedArgumentError
from lade.embedded import model_path
from lade.peers import Jacobi, PromptLookup, Suffix, TokenRecycling
from lade.testing import toy_model

NEW = 24
PEERS = {
    "suffix": lambda: Suffix(12),
    "suffix-kept": lambda: Suffix(12, keep_tokens=200),
    "recycling": lambda: TokenRecycling(12),
    "recycling-kept": lambda: TokenRecycling(12, keep=True),
    "lookup": lambda: PromptLookup(12),
    "jacobi": lambda: Jacobi(6),
}
WAYS = {
    "alone": {"only": True},
    "default": {},
    "sized": {"budget": 8},
    "paper": {"window": 3, "ngram": 4, "guesses": 4},
}
MODEL = toy_model("llama")
PROMPTS = torch.tensor([[1, 2, 3, 4, 1, 2], [5, 6, 7, 8, 7, 6], [1, 2, 9, 3, 1, 2]])


def compare(peer, way, seeds, ids, **sampling):
    config = LookaheadConfig(sources=[PEERS[peer]()], **WAYS[way])
    for seed in seeds:
        assert_same_tokens(MODEL, config, seed=seed, input_ids=ids, max_new_tokens=NEW, **sampling)


SAMPLED = {"do_sample": True, "temperature": 0.8}


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("peer", PEERS)
def test_alone_the_tokens_are_plains(peer, sampling):
    compare(peer, "alone", range(1 + bool(sampling)), PROMPTS, **sampling)


@pytest.mark.parametrize("peer", ["suffix", "recycling", "lookup", "jacobi"])
@pytest.mark.parametrize("way", ["default", "sized", "paper"])
def test_beside_others_the_tokens_are_plains(way, peer):
    compare(peer, way, [0], PROMPTS[:1])
    compare(peer, way, [1], PROMPTS, **SAMPLED)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("peer", "only"), [(peer, at % 2 == turn) for at, peer in enumerate(PEERS) for turn in (0, 1)])
def test_an_engine_serves_them(peer, only):
    config = LookaheadConfig(sources=[PEERS[peer]()], only=only)
    with lade.Engine(MODEL, max_rows=2) as engine:
        handles = [engine.add(row, max_new_tokens=NEW, lookahead=config) for row in [*PROMPTS, PROMPTS[0]]]
        beside = engine.add(PROMPTS[1], max_new_tokens=NEW)
        found = [handle.result(60)[0] for handle in [*handles, beside]]
    for row, written in zip([*PROMPTS, PROMPTS[0], PROMPTS[1]], found, strict=True):
        assert torch.equal(written, MODEL.generate(row[None], max_new_tokens=NEW)[0])


@pytest.mark.parametrize(
    ("make", "source", "least"),
    [
        (lambda: Suffix(8), "suffix", 1.3),
        (lambda: TokenRecycling(8), "recycled", 1.3),
        (lambda: PromptLookup(8), "lookup", 1.3),
        (lambda: Jacobi(7), "jacobi", 1.01),
    ],
)
def test_alone_they_draft_and_nothing_else_does(make, source, least):
    """On a model of code, which repeats itself; each feeds its budget at most."""
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    ids, stats = torch.arange(40, 60)[None].repeat(1, 2), Stats()
    config = LookaheadConfig(sources=[make()], only=True)
    steps = list(lade.stream(model, ids, max_new_tokens=96, do_sample=False, lookahead=config, stats=stats))
    assert {name for step in steps[1:] for name in step.sources} == {source, "bonus"}
    assert stats.tokens_per_step > least
    assert 4 <= max(stats.step_tokens) <= 8
    beside = LookaheadConfig(sources=[make()], budget=8)
    steps = lade.stream(model, ids, max_new_tokens=96, do_sample=False, lookahead=beside)
    sources = {name for step in steps for name in step.sources}
    assert len(sources - {"prefill", "bonus"}) > 1, "beside the default method it is one of several"


class Several(Drafter):
    """Proposes one continuation more than it may."""

    continuations = 3

    def propose(self, request, tokens, most):
        assert most == 127
        return [[number] * 2 for number in range(4)]


def test_alone_proposals_are_fed_as_they_are_up_to_a_bound():
    class Endless(Drafter):
        def propose(self, request, tokens, most):
            return [[first] * 200 for first in range(8)]

    for drafter, fed in ((Several(), 7), (Endless(), 128)):
        stats, config = Stats(), LookaheadConfig(sources=[drafter], only=True)
        assert_same_tokens(MODEL, config, stats=stats, input_ids=PROMPTS[:1], max_new_tokens=20)
        assert set(stats.step_tokens) == {fed}


class Observer(Drafter):
    """Checks what it observes by the model."""

    def __init__(self):
        self.prompts, self.texts, self.passes, self.prompt = {}, {}, 0, 0

    def begin(self, request, prompt):
        self.texts[request] = list(prompt)

    def propose(self, request, tokens, most):
        return [tokens[-4:], tokens[-6:-4]]

    def learn(self, request, tokens):
        self.before, self.texts[request] = list(self.texts[request]), [*self.texts[request], *tokens]

    def observe_prompt(self, request, tokens, likely):
        self.prompt += len(tokens)
        assert list(tokens) == self.texts[request][: len(tokens)], "the text has begun"
        assert [row[0] for row in likely] == predicted(tokens)

    def observe(self, request, tokens, parents, likely):
        self.passes += 1
        assert tokens[0] == self.before[-1], "after `learn`"
        assert len(tokens) == len(parents) == len(likely) and parents[0] == -1
        paths = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([token] if parent < 0 else [*paths[parent], token])
        for path, row in zip(paths, likely, strict=True):
            assert row[0] == predicted([*self.before[:-1], *path])[-1]
            assert 1 < len(row) == len(set(row)) <= 6


def predicted(tokens):
    return MODEL(torch.tensor([list(tokens)])).logits[0].argmax(-1).tolist()


@pytest.mark.parametrize("more", [{"only": True}, {}, {"budget": 6}, {"window": 3, "ngram": 3, "guesses": 3}], ids=str)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_drafter_observes_the_models_predictions(more, sampled):
    drafter, stats = Observer(), Stats()
    config = LookaheadConfig(sources=[drafter], **more)
    lade.generate(MODEL, PROMPTS[:1], max_new_tokens=8, do_sample=sampled, lookahead=config, stats=stats)
    assert drafter.passes == stats.steps > 2
    assert drafter.prompt == PROMPTS.shape[1]


@pytest.mark.parametrize(
    ("arguments", "problem", "message"),
    [
        ({"prediction": [1]}, UnsupportedArgumentError, "prediction with only=True"),
        ({"num_beams": 2}, UnsupportedArgumentError, "sources"),
        ({"use_mtp": True}, ConfigError, r"^mtp=True .*leave out only=True"),
    ],
)
def test_arguments_that_nothing_would_use_are_refused(arguments, problem, message):
    config = LookaheadConfig(sources=[Suffix()], only=True)
    with pytest.raises(problem, match=message):
        lade.generate(MODEL, PROMPTS[:1], max_new_tokens=4, lookahead=config, **arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sources": ()}, "^only=True .*give sources too, or leave it out"),
        ({"only": 1}, "^only=1 .*give True or False"),
        ({"window": 3}, "^window=3 .*the sources draft alone: leave it out, or leave out only=True"),
        ({"window": 7}, "^window=7 .*leave out only=True"),
        ({"ngram": 5}, "^ngram=5 .*leave out only=True"),
        ({"guesses": 0}, "^guesses=0 .*leave out only=True"),
        ({"budget": 8}, "^budget=8 .*leave out only=True"),
        ({"memory": lade.Memory()}, "^memory=.*leave out only=True"),
        ({"mtp": True}, "^mtp=True .*leave out only=True"),
        ({"adaptive": True}, "^adaptive=True .*leave out only=True"),
        ({"adaptive": True, "budget": 8}, "leave out only=True"),
        ({"prompt_ngrams": False}, "^prompt_ngrams=False .*leave out only=True"),
        ({"seed": 3}, "^seed=3 .*leave out only=True"),
        ({"sources": [type("Wide", (Several,), {"continuations": 0})()]}, "^continuations=0 .*>= 1"),
    ],
)
def test_only_goes_with_sources_and_nothing_else(fields, message):
    with pytest.raises(ConfigError, match=message):
        LookaheadConfig(**{"sources": [Suffix()], "only": True, **fields})


def test_a_config_with_only_can_be_copied_and_its_neighbours_are_allowed():
    config = LookaheadConfig(sources=[Suffix()], only=True, mtp=False)
    assert dataclasses.replace(config) == config
    assert not config.adaptive and config.method.name == "sources"
    with pytest.raises(ConfigError, match=r"^window=8"):
        dataclasses.replace(config, window=8)
