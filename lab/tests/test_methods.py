"""Method syntax on the command line."""

import pytest

from lade.errors import ConfigError
from lade_lab.harness.methods import DEFAULT, KINDS, parse, parse_all, reference_of
from lade_lab.results import Method


@pytest.mark.parametrize(
    ("text", "name", "config"),
    [
        ("hf", "hf", {}),
        ("plain", "plain", {}),
        ("hf-assisted", "hf-assisted", {}),
        ("hf-prompt-lookup", "hf-prompt-lookup", {"prompt_lookup_num_tokens": 10}),
        ("jacobi", "jacobi", {"guesses": 8}),
        ("jacobi=3", "jacobi 3", {"guesses": 3}),
        ("suffix", "suffix", {"budget": 16}),
        ("mtp", "mtp", {"depth": 3}),
        ("mtp=1", "mtp 1", {"depth": 1}),
        ("hf-mtp", "hf-mtp", {"use_mtp": True}),
        ("prompt-lookup=4", "prompt-lookup 4", {"budget": 4}),
        ("lookup=4", "prompt-lookup 4", {"budget": 4}),
        ("token-recycling=64", "token-recycling 64", {"budget": 64}),
        ("lookahead", "lookahead", {"window": 7, "ngram": 5, "guesses": 7}),
        ("lookahead=15,5,15", "lookahead 15,5,15", {"window": 15, "ngram": 5, "guesses": 15}),
        (" lookahead = 0, 2 ,0", "lookahead 0,2,0", {"window": 0, "ngram": 2, "guesses": 0}),
        ("adaptive", "adaptive", {"budget": None}),
        ("adaptive=32", "adaptive 32", {"budget": 32}),
        ("adaptive-warm=9", "adaptive-warm 9", {"budget": 9}),
    ],
)
def test_a_method_by_its_text(text, name, config):
    assert parse(text) == Method(name, name.split()[0], config)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("beam", "give one of hf, hf-prompt-lookup"),
        ("", "give one of"),
        ("plain=3", "write plain"),
        ("lookahead=15,5", "write lookahead=W,N,G with whole numbers"),
        ("adaptive=", "write adaptive=B"),
        ("adaptive=3.5", "write adaptive=B"),
        ("adaptive=-1", "write adaptive=B"),
        ("jacobi=0", "methods='jacobi=0' is not valid: K=0: give a whole number >= 1"),
        ("lookahead=3,1,3", "methods='lookahead=3,1,3' is not valid: N=1: give a whole number >= 2"),
        ("mtp=9", "methods='mtp=9' is not valid: K=9: give a whole number >= 1 and <= 5"),
        ("adaptive=0", "methods='adaptive=0' is not valid: B=0: give a whole number >= 1"),
        ("token-recycling=0", "methods='token-recycling=0' is not valid: B=0: give a whole number >= 1 and <= 128$"),
        ("drafter", "MODULE:CLASS"),
        ("drafter=nowhere", "MODULE:CLASS"),
        ("drafter=no_such_module:Mine", "ModuleNotFoundError"),
        ("drafter=json:loads=8", "TypeError"),
        ("drafter=json:JSONDecoder=8", "lade.Drafter"),
        ("drafter=json:JSONDecoder=x", "=B"),
    ],
)
def test_what_is_no_method(text, remedy):
    with pytest.raises(ConfigError, match=remedy):
        parse(text)


def test_commas_between_methods_and_sizes_and_the_default_has_the_peers_and_fixed_sizes_to_beat():
    found = parse_all(["hf, lookahead=15,5,15,adaptive=32,plain", "jacobi"])
    assert [method.name for method in found] == ["hf", "lookahead 15,5,15", "adaptive 32", "plain", "jacobi"]
    names = {method.name for method in parse_all(DEFAULT)}
    assert {"prompt-lookup", "suffix", "adaptive 8", "adaptive 16", "adaptive 32", "adaptive"} <= names
    assert {method.kind for method in parse_all(DEFAULT)} == KINDS.keys() - {
        *("hf-assisted", "hf-mtp", "drafter", "mtp", "token-recycling")
    }


@pytest.mark.parametrize(
    ("texts", "draft", "remedy"),
    [
        (["hf,plain,hf"], False, "hf is named twice"),
        (["lookahead=7,5,7", "lookahead=7,5,7"], False, "lookahead 7,5,7 is named twice"),
        ([" , "], False, "give some of"),
        (["hf-assisted"], False, "needs --draft MODEL"),
        (["hf"], True, "only hf-assisted uses a draft model"),
    ],
)
def test_what_is_no_list_of_methods(texts, draft, remedy):
    with pytest.raises(ConfigError, match=remedy):
        parse_all(texts, draft=draft)


def test_assisted_methods_are_not_compared_when_sampling():
    texts = ["hf,hf-prompt-lookup,hf-assisted,plain,lookahead"]
    assert all(method.compared for method in parse_all(texts, draft=True))
    sampled = parse_all(texts, sampling=True, draft=True)
    assert [method.name for method in sampled if not method.compared] == ["hf-prompt-lookup", "hf-assisted"]


@pytest.mark.parametrize(
    ("texts", "sampling", "expected"),
    [
        ("plain,adaptive,hf", False, "hf"),
        ("adaptive,plain", False, "plain"),
        ("lookahead,adaptive", False, "lookahead"),
        ("hf-prompt-lookup,adaptive", False, "hf-prompt-lookup"),
        ("hf-prompt-lookup,adaptive", True, "adaptive"),
    ],
)
def test_the_reference_draws_as_the_others_do(texts, sampling, expected):
    assert reference_of(parse_all([texts], sampling=sampling)).name == expected
    with pytest.raises(ConfigError, match="add one such as hf or plain"):
        reference_of(parse_all(["hf-prompt-lookup"], sampling=True))


DRAFTER = (
    "from lade import Drafter\nclass Mine(Drafter):\n    def propose(self, request, tokens, most):\n        pass\n"
)


def test_a_drafter_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_bench_drafts.py").write_text(DRAFTER)
    found = parse_all(["hf", "drafter=my_bench_drafts:Mine=8", "drafter=my_bench_drafts:Mine"])
    assert [method.name for method in found] == ["hf", "Mine 8", "Mine"]
    assert found[1].config == {"drafter": "my_bench_drafts:Mine", "budget": 8}
