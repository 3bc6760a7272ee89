"""Grammars of strangers are compiled in a process of its own first, which is ended where one takes too long."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_grammar import END, TOKENIZER

from lade import Grammar
from lade.backends.grammar import trial as trials
from lade.backends.grammar.compiled import Vocabulary
from lade.backends.grammar.trial import GrammarTrial, TrialError
from lade.grammar import GrammarError

SLOW = {
    "a large multiple": Grammar.json_schema({"type": "integer", "multipleOf": 999_983}),
    "patterns at once": Grammar.json_schema(
        {"allOf": [{"type": "string", "pattern": f"a.{{{number}}}b{number}"} for number in range(20)]}
    ),
}
QUICK = {
    "a schema": Grammar.json_schema({"type": "object", "properties": {"name": {"type": "string"}}}),
    "a pattern": Grammar.regex("[a-z]+é"),
    "many texts": Grammar.choice([f"word {number}" for number in range(2_000)]),
    "a special token": Grammar.lark('start: <|end|> "a"'),
    "several lines": Grammar.lark('start: a  <|end|>\na: "x\\n  y"\n'),
    "a token by number": Grammar.lark('start: <[7]> "a"'),
    "no grammar at all": Grammar("start: nothing"),  # which is found out with the tokenizer
}


@pytest.fixture(scope="module")
def trial():
    made = GrammarTrial(["<|end|>", "\n", "  ", '"', "[multimodal]"])  # added tokens as Gemma's: one has a name
    yield made
    made.close()


@pytest.mark.parametrize("name", SLOW)
def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_tried_all_the_same(trial, name):
    with pytest.raises(GrammarError, match=r"takes more than 0\.5 s"):
        trial(SLOW[name].source)
    trial(QUICK["a schema"].source)


@pytest.mark.parametrize("name", QUICK)
def test_others_pass_in_the_process_that_is_there(trial, name):
    trial(QUICK[name].source)
    process = trial._process
    trial(QUICK[name].source)
    assert trial._process is process and process.poll() is None


def test_several_threads_take_turns(trial):
    grammars = [*QUICK.values(), SLOW["a large multiple"], *QUICK.values()]
    with ThreadPoolExecutor(len(grammars)) as pool:
        trials_of = [pool.submit(trial, grammar.source) for grammar in grammars]
    failed = [grammar for grammar, tried in zip(grammars, trials_of, strict=True) if tried.exception()]
    assert failed == [SLOW["a large multiple"]]


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs signals")
@pytest.mark.parametrize(
    ("fate", "times"),
    [("SIGKILL", 1), ("SIGKILL", 2), ("SIGSTOP", 1), pytest.param("SIGSTOP", 2, marks=pytest.mark.slow)],
)
def test_what_befalls_the_process_is_no_fault_of_the_grammar(monkeypatch, fate, times):
    monkeypatch.setattr(trials, "WALL_SECONDS", 2.0)
    made = GrammarTrial()
    make, left = GrammarTrial._running, [fate] * times

    def running(self):
        process = make(self)
        if left:
            os.kill(process.pid, getattr(signal, left.pop()))
        return process

    monkeypatch.setattr(GrammarTrial, "_running", running)
    if times == 1:
        made(QUICK["a schema"].source)
    else:
        with pytest.raises(TrialError, match="try again later"):
            made(QUICK["a schema"].source)
    made(QUICK["a schema"].source)
    made.close()


def test_no_grammar_is_compiled_where_the_process_cannot_be_started(monkeypatch):
    monkeypatch.setattr(trials.sys, "executable", "/no/such/program")
    with pytest.raises(TrialError, match="cannot be tried now"):
        GrammarTrial()(QUICK["a schema"].source)


def test_its_process_ends_with_it():
    made = GrammarTrial()
    made(QUICK["a pattern"].source)
    process = made._process
    made.close()
    assert process.poll() is not None
    made(QUICK["a pattern"].source)  # begins another
    process = made._process
    del made
    assert process.wait(10) is not None


def test_a_vocabulary_tries_what_it_has_not_compiled_yet():
    tried = []
    vocabulary = Vocabulary(TOKENIZER, (END,)).with_trial(tried.append)
    for _ in range(2):
        vocabulary.compiled(QUICK["a pattern"].source)
    assert tried == [QUICK["a pattern"].source]
