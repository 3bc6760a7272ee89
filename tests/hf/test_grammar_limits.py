"""Grammars that come to a limit: for one answer and no other, with the same words in all ways to decode."""

import json
import random

import numpy as np
import pytest
import torch
from test_grammar import CHOICE, END, MODEL, PAPER, PROMPT, PROMPTS, SAMPLED, TOKENIZER, guided, plainly
from transformers import LogitsProcessor

import lade
from lade import Grammar, InputError
from lade.backends.grammar import compiled as matchers
from lade.backends.grammar.backend import processor_of
from lade.backends.grammar.compiled import (
    LIMITS,
    GrammarBudget,
    GrammarError,
    Matcher,
    Vocabulary,
    vocabulary_of_tokenizer,
)

ENDLESS = Grammar.regex("(?s:.*)a(?s:.{200})")
"""Its lexer finds states as long as an answer goes on."""
TOO_MUCH = Grammar.regex("(((a{99}){99}){99}){9}")
"""Too much after its first token."""


@pytest.fixture
def vocabulary():
    """Without compiled grammars."""
    return Vocabulary(TOKENIZER, (END,))


def allowed(mask):
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: len(TOKENIZER)]).tolist()


def limit(patch, **limits):
    """Let lexers grow no further than so."""
    for name, most in limits.items():
        patch.setitem(LIMITS, name, most)


def walk(matcher, seed, most=12, text=None):
    """The tokens of an answer that is made at random, without its end; they are added to `text`."""
    drawn, text = random.Random(seed), [] if text is None else text
    while len(text) < most:
        token = drawn.choice(allowed(matcher.mask()))
        if token == END:
            break
        assert matcher.take([token]) == 1
        text.append(token)
    return text


def test_answers_that_add_up_to_a_limit_do_not_fail_each_other(vocabulary, monkeypatch):
    limit(monkeypatch, max_lexer_states=1_000)
    first = vocabulary.compiled(ENDLESS.source)
    for seed in range(8):
        assert len(walk(Matcher(vocabulary, ENDLESS.source), seed)) == 12
    assert vocabulary.compiled(ENDLESS.source) is not first, "it has come to its limit"


def test_an_answer_goes_as_far_whatever_others_have_written(vocabulary, monkeypatch):
    """What fails is its own text: with a lexer for itself, or one that others have filled, or that has failed them."""
    limit(monkeypatch, max_lexer_states=300)
    shared, lengths = Matcher(vocabulary, ENDLESS.source), {seed: list[int]() for seed in range(3)}
    for _ in range(2):
        for seed, found in lengths.items():
            for matcher in (shared.copy(), Matcher(vocabulary, ENDLESS.source)):
                text = list[int]()
                with pytest.raises(GrammarError, match="limits for following it: lexer error: too many states"):
                    walk(matcher, seed, 400, text)
                found.append(len(text))
    assert all(len(set(found)) == 1 < found[0] for found in lengths.values())


def test_a_place_is_kept_when_its_lexer_is_renewed(vocabulary, monkeypatch):
    """Copies, ways back and masks are those of a lexer that has never failed."""
    for seed in range(4):
        fresh, other = Matcher(vocabulary, ENDLESS.source), Vocabulary(TOKENIZER, (END,))
        with monkeypatch.context() as small:
            limit(small, max_lexer_states=1_000)
            renewed = [Matcher(other, ENDLESS.source) for _ in range(3)]
            text = walk(fresh, seed, 10)
            for matcher in renewed:
                assert matcher.take(text) == 10
                copied = matcher.copy()
                walk(matcher, seed + 10, 8)
                matcher.rollback(8)
                for each in (matcher, copied):
                    assert each.mask() == fresh.mask() and each.forced_tokens() == fresh.forced_tokens()
                    assert each.valid_prefix(text[:3]) == fresh.valid_prefix(text[:3])


def test_two_thousand_texts_are_followed(vocabulary):
    drawn = random.Random(1)
    texts = sorted({"".join(drawn.choices("abcdefgh ", k=drawn.randint(1, 16))) for _ in range(2_500)})
    assert len(texts) > 2_000
    grammar = Grammar.choice(texts)
    for text in drawn.sample(texts, 20):
        matcher, ids = Matcher(vocabulary, grammar.source), TOKENIZER(text, add_special_tokens=False)["input_ids"]
        start = next((n for n, _ in enumerate(ids) if TOKENIZER.decode(ids[n:]) == text), 0)
        assert matcher.take(ids[start:]) == len(ids[start:]) and END in allowed(matcher.mask())
    written = TOKENIZER.decode(guided(grammar)[0, PROMPT.shape[1] :], skip_special_tokens=True)
    assert written in texts


TRICKY = ["a", "ab", "abc", "b\n", 'c "d"', "c \\d", "é", "ée", "🙂", "\t", "/", "a|b", "\x01"]


def test_a_choice_allows_what_its_texts_do_as_rules(vocabulary):
    rules = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in TRICKY)
    for seed in range(40):
        pair = [Matcher(vocabulary, source) for source in (Grammar.choice(TRICKY).source, rules)]
        drawn = random.Random(seed)
        while True:
            masks = [allowed(matcher.mask()) for matcher in pair]
            assert masks[0] == masks[1]
            if (token := drawn.choice(masks[0])) == END:
                break
            assert [matcher.take([token]) for matcher in pair] == [1, 1]


def outcome(make):
    """The tokens, or the error."""
    try:
        return make().tolist()
    except InputError as problem:
        return f"{type(problem).__name__}: {problem}"


FORBIDDEN = "another processor forbids all tokens"
CASES = {
    "it takes too much": (TOO_MUCH, {}, "exceeds the limits for following it: lexer error: too many expr"),
    "it ends too early": (Grammar.choice(["yes"]), {"min_new_tokens": 9}, FORBIDDEN),
    "it repeats itself": (Grammar.regex("(ab){9}"), {"no_repeat_ngram_size": 1}, FORBIDDEN),
}


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", CASES)
def test_where_a_grammar_cannot_be_followed_all_ways_say_so(name, sampling, monkeypatch):
    """A row, a batch, answers that are to be drawn from one prompt, and the rows of an engine."""
    limit(monkeypatch, initial_lexer_fuel=20_000)
    grammar, arguments, said = CASES[name]
    arguments = {"max_new_tokens": 40, **arguments, **sampling}
    calls = [{"ids": PROMPT}, {"ids": PROMPTS}]
    calls += [{"ids": PROMPT, "num_return_sequences": 3}] if sampling else []
    found = [outcome(lambda call=call, way=way: way(grammar, **call, **arguments)) for call in calls for way in WAYS]
    with lade.Engine(MODEL) as engine:
        handle = engine.add(PROMPT, grammar=grammar, tokenizer=TOKENIZER, **arguments)
        found.append(outcome(lambda: handle.result(60.0)))
        assert engine.add(PROMPT, max_new_tokens=3).result(60.0) is not None, "others go on"
    assert said in found[0] and found == found[:1] * len(found)


WAYS = (plainly, guided)


class Without(LogitsProcessor):
    """Forbids a token at one place of the text."""

    def __init__(self, token, length):
        self.token, self.length = token, length

    def __call__(self, ids, scores):
        if ids.shape[1] == self.length:
            scores = scores.clone()
            scores[:, self.token] = -torch.inf
        return scores


def test_beams_that_cannot_go_on_leave_the_search_to_others():
    """One of two texts is cut off by another processor; a search of one beam has nothing left."""
    grammar = Grammar.choice(["ab", "cd"])
    for text in ("b", "d"):
        token = TOKENIZER(text, add_special_tokens=False)["input_ids"][-1]
        arguments = {"processors": [Without(token, PROMPT.shape[1] + 1)], "num_beams": 2, "max_new_tokens": 6}
        assert torch.equal(plainly(grammar, **arguments), guided(grammar, lookahead=PAPER, **arguments))


def test_a_row_of_a_batch_that_has_ended_is_none_that_cannot_go_on():
    """Stop strings end it amid its grammar; then it is padded, while the minimum of tokens forbids its end."""
    grammar = [Grammar.regex("[ab]{6}stop[ab]{9}"), Grammar.regex("[ab]{30}"), Grammar.regex("[cd]{30}")]
    arguments = {"max_new_tokens": 30, "stop_strings": "stop", "tokenizer": TOKENIZER, "repetition_penalty": 1.3}
    ours = lade.generate(MODEL, PROMPTS, grammar=grammar, lookahead=PAPER, **arguments)
    expected = lade.generate(MODEL, PROMPTS, grammar=grammar, lookahead=None, **arguments)
    assert torch.equal(ours, expected)


HALVES = {
    "regex": lambda: Grammar.regex("\ud800"),
    "choice": lambda: Grammar.choice(["a", "\ud800"]),
    "lark": lambda: Grammar.lark('start: "\ud800"'),
    "json_schema": lambda: Grammar.json_schema('{"type": "string", "pattern": "\ud800"}'),
    "a schema": lambda: Grammar.json_schema({"enum": ["\ud800"]}).processor(TOKENIZER),
    "source": lambda: Grammar('start: "\ud800"').processor(TOKENIZER),
}


@pytest.mark.parametrize("name", HALVES)
def test_half_a_character_is_no_text(name):
    with pytest.raises(InputError):
        HALVES[name]()


def test_answers_to_one_request_share_its_time(vocabulary, monkeypatch):
    clock = [0.0]

    def tick():
        clock[0] += 0.02  # for each look: 20 ms a call
        return clock[0]

    monkeypatch.setattr(matchers, "thread_time", tick)
    budget = GrammarBudget(0.1, 0.03)
    one, other = (Matcher(vocabulary, CHOICE.source, budget) for _ in range(2))
    for matcher in (one, other, one.copy(), other):
        matcher.mask()
    with pytest.raises(GrammarError, match=r"to follow: 0\.12 s for 0 tokens, where 0\.1 s and 30 ms per token"):
        for _ in range(2):
            one.mask()
    one.count_token()
    one.count_token()
    other.mask()


def test_an_engine_ends_the_answer_alone_whose_time_is_over():
    spent = processor_of([CHOICE], vocabulary_of_tokenizer(TOKENIZER), GrammarBudget(0.0, 0.0))
    with lade.Engine(MODEL) as engine:
        handles = [engine.add(PROMPT, max_new_tokens=8, logits_processor=own) for own in ([], [spent], [])]
        with pytest.raises(GrammarError, match="too long to follow"):
            handles[1].result(60.0)
        assert [len(handles[place].result(60.0)[0]) for place in (0, 2)] == [PROMPT.shape[1] + 8] * 2
