"""`LookaheadConfig(sources=[...])` everywhere: plain decoding's tokens, whatever a caller's drafter proposes."""

import pickle
import random

import numpy as np
import pytest
import torch

import lade
from lade import ConfigError, Continuation, Drafter, DrafterError, LookaheadConfig, Stats, UnsupportedArgumentError
from lade.testing import toy_model

NEW = 32
MODEL = toy_model("llama")
PROMPT, PROMPTS = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 9, 3]])
SAMPLED = {"do_sample": True, "temperature": 0.8}


def plain(ids=PROMPT, **arguments):
    torch.manual_seed(0)
    return MODEL.generate(ids, max_new_tokens=NEW, **arguments)


def drafted(lookahead, ids=PROMPT, **arguments):
    torch.manual_seed(0)
    return lade.generate(MODEL, ids, max_new_tokens=NEW, lookahead=lookahead, **arguments)


class Oracle(Drafter):
    """Knows the answers, by their prompts."""

    def __init__(self, texts, claimed=None):
        self.texts, self.claimed = [row.tolist() for row in texts], claimed
        self.calls, self.open = [], {}

    def begin(self, request, prompt):
        self.calls.append("begin")
        self.open[request] = list(prompt)

    def propose(self, request, tokens, most):
        assert list(tokens[: len(self.open[request])]) == self.open[request]  # learned all of it
        text = next(each for each in self.texts if each[:4] == list(tokens[:4]))
        tokens = text[len(tokens) :][:most]
        return [tokens if self.claimed is None else Continuation(tokens, [self.claimed] * len(tokens))]

    def learn(self, request, tokens):
        self.open[request] += tokens

    def end(self, request):
        self.calls.append(self.open.pop(request))


class Liar(Oracle):
    """Proposes what does not come, and is sure of it."""

    def propose(self, request, tokens, most):
        return [
            Continuation([(token + 1) % 48 for token in each], [1.0] * len(each))
            for each in super().propose(request, tokens, most)
        ]


METHODS = [{}, {"budget": 8}, {"window": 4, "ngram": 5, "guesses": 4}]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("more", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("sizes", METHODS)
@pytest.mark.parametrize("kind", [Oracle, Liar])
@pytest.mark.parametrize("ids", [PROMPT, PROMPTS], ids=["row", "batch"])
def test_the_tokens_are_plains_and_each_text_begins_and_ends(ids, kind, sizes, more):
    expected = plain(ids, **more)
    drafter = kind(expected)
    assert torch.equal(drafted(LookaheadConfig(sources=[drafter], **sizes), ids, **more), expected)
    ended = [call for call in drafter.calls if call != "begin"]
    assert sorted(ended) == sorted(drafter.texts)
    assert not drafter.open


@pytest.mark.parametrize("claimed", [None, 0.1, 0.9])
def test_drafts_of_an_oracle_are_accepted_and_named(claimed):
    stats, expected = Stats(), plain()
    config = LookaheadConfig(budget=8, sources=[Oracle(expected, claimed)])
    drafted(config, stats=stats)
    assert stats.tokens_per_step > 4
    steps = lade.stream(MODEL, PROMPT, max_new_tokens=NEW, lookahead=config)
    assert sum(step.sources.count("Oracle") for step in steps) > NEW // 2


class Broken(Drafter):
    def __init__(self, fails):
        self.fails, self.ended = fails, 0

    def begin(self, request, prompt):
        if self.fails == "begin":
            raise KeyError("begin")

    def propose(self, request, tokens, most):
        if len(tokens) < 8:
            return None
        match self.fails:
            case "propose":
                raise ZeroDivisionError("in propose")
            case "large":
                return [[48]]
            case "negative":
                return [[-1]]
            case "text":
                return ["abc"]
            case "flat":
                return [1, 2, 3]
            case "float":
                return [[1.5]]
            case "claims":
                return [Continuation([1, 2], [0.5])]
            case "nan":
                return [Continuation([1], [float("nan")])]
        return []

    def learn(self, request, tokens):
        if self.fails == "learn":
            raise ZeroDivisionError("in learn")

    def end(self, request):
        self.ended += 1
        if self.fails == "end":
            raise ZeroDivisionError("in end")


FAILURES = ["begin", "propose", "learn", "large", "negative", "text", "flat", "float", "claims", "nan"]


@pytest.mark.parametrize("fails", FAILURES)
def test_a_failing_drafter_is_an_error_that_names_it_and_other_requests_of_an_engine_go_on(fails):
    drafter = Broken(fails)
    with pytest.raises(DrafterError, match="Broken") as caught:
        drafted(LookaheadConfig(sources=[drafter]))
    assert drafter.ended == 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    if fails == "propose":
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    drafter, expected = Broken(fails), plain(PROMPTS[1:2])
    with lade.Engine(MODEL, max_rows=2) as engine:
        good = engine.add(PROMPTS[1], max_new_tokens=NEW)
        bad = engine.add(PROMPTS[0], max_new_tokens=NEW, lookahead=LookaheadConfig(sources=[drafter]))
        with pytest.raises(DrafterError, match="Broken"):
            bad.result(60)
        assert torch.equal(good.result(60), expected)
        assert torch.equal(engine.add(PROMPTS[1], max_new_tokens=NEW).result(60), expected)
    assert drafter.ended == 1


def test_an_error_at_the_end_is_logged(caplog):
    assert torch.equal(drafted(LookaheadConfig(sources=[Broken("end")])), plain())
    assert "Broken.end failed" in caplog.text


def test_a_cancelled_request_and_a_stream_that_is_left_end_their_texts():
    drafter = Oracle(plain(PROMPTS))
    asked = {"max_new_tokens": NEW, "lookahead": LookaheadConfig(sources=[drafter])}
    with lade.Engine(MODEL, max_rows=2) as engine:
        handle = engine.add(PROMPTS[0], **asked)
        next(iter(handle))
        handle.cancel()
    assert not drafter.open
    steps = lade.stream(MODEL, PROMPT, **asked)
    next(steps), next(steps)
    assert drafter.open
    steps.close()
    assert not drafter.open


class Endless(Drafter):
    def propose(self, request, tokens, most):
        while True:
            yield iter(int, 1)  # zeros without end


class Mutating(Drafter):
    def propose(self, request, tokens, most):
        assert isinstance(tokens, tuple)  # not the text itself
        return [torch.tensor(tokens[-4:])]


@pytest.mark.parametrize("kind", [Endless, Mutating])
def test_endless_proposals_are_cut_and_tensors_are_taken(kind):
    assert torch.equal(drafted(LookaheadConfig(sources=[kind()])), plain())


def test_what_cannot_be_drafted_for_is_refused():
    for arguments in ({"num_beams": 2}, {"ids": PROMPTS, "logits_processor": [lambda ids, scores: scores]}):
        with pytest.raises(UnsupportedArgumentError, match="sources"):
            drafted(LookaheadConfig(sources=[Broken("")]), **arguments)


class Named(Broken):
    name = "memory"


@pytest.mark.parametrize(
    ("sources", "remedy"),
    [
        (Broken(""), "a list"),
        ([Broken], "not its class"),
        ([object()], "subclasses"),
        ([Named("")], "'memory' is reserved: give the drafter another name"),
        ("abc", "a list"),
    ],
)
def test_sources_are_checked(sources, remedy):
    with pytest.raises(ConfigError, match=remedy):
        LookaheadConfig(sources=sources)


# Random numbers


class Draws(lade.Drafter):
    """Draws from every generator of the process, whenever it is called."""

    def __init__(self):
        self.drawn = []

    def draw(self, *args):
        self.drawn.append(float(torch.rand(())))
        random.random()
        np.random.rand()
        torch.manual_seed(len(self.drawn))

    begin = learn = end = draw

    def propose(self, request, tokens, most):
        self.draw()
        return [torch.randint(0, 40, (3,)).tolist()]


@pytest.mark.parametrize("config", [{"budget": 6}, {}, {"window": 3, "ngram": 3, "guesses": 3}], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_drafter_that_draws_changes_no_sample_and_leaves_all_generators_as_plain_decoding_does(config, rows):
    model, drafter = toy_model("llama"), Draws()
    given = {"input_ids": torch.arange(1, 9).repeat(rows, 1), "max_new_tokens": 24, "do_sample": True}

    def states():
        return random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().tolist()

    torch.manual_seed(5)
    expected, after = model.generate(**given), states()
    torch.manual_seed(5)
    found = lade.generate(model, lookahead=lade.LookaheadConfig(sources=[drafter], **config), **given)
    assert torch.equal(found, expected) and states() == after
    assert len(set(drafter.drawn)) > 3, "its own generators go on"
