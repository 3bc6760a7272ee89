"""What `--method`, the sizes, `--budget` and `--memory` mean together."""

import pytest
from test_cli_errors import fails

from lade import LookaheadConfig
from lade.cli.options.decoding import Speed

PROMPT = "say it again, say it"


@pytest.fixture
def memory(tmp_path):
    path = tmp_path / "texts.memory"
    path.write_bytes(b"")
    return path


def test_methods():
    assert Speed(None).lookahead() == Speed("auto").lookahead() == "auto"
    assert Speed("plain").lookahead() is None
    assert Speed("adaptive").lookahead() == LookaheadConfig() and Speed("adaptive").lookahead().adaptive
    assert Speed("lookahead").lookahead() == LookaheadConfig(adaptive=False)
    assert not Speed("lookahead").lookahead().adaptive


@pytest.mark.parametrize("method", [None, "auto", "lookahead"])
def test_sizes_imply_lookahead(method):
    assert Speed(method, window=3, guesses=0).lookahead() == LookaheadConfig(window=3, guesses=0)
    assert Speed(method, window=7, ngram=5, guesses=7).lookahead() == LookaheadConfig(7, 5, 7), (
        "the defaults are sizes too"
    )
    assert not Speed(method, window=7, ngram=5, guesses=7).lookahead().adaptive


@pytest.mark.parametrize("method", [None, "auto", "adaptive"])
def test_a_budget_and_a_memory_imply_adaptive(method, memory):
    assert Speed(method, budget=9).lookahead() == LookaheadConfig(budget=9)
    assert Speed(method, memory=memory).lookahead() == LookaheadConfig()
    assert Speed(method, budget=1, memory=memory).lookahead() == LookaheadConfig(budget=1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", 0], ["--budget 0", ">= 1"]),
        (["--method", "plain", "--budget", 9], ["--method plain", "--budget 9", "leave out"]),
        (["--method", "plain", "--memory", "MEMORY"], ["--method plain", "--memory", "leave out"]),
        (["--method", "lookahead", "--budget", 9], ["--method lookahead", "--budget 9", "--method adaptive"]),
        (["--method", "lookahead", "--memory", "MEMORY"], ["--method lookahead", "--memory", "--method adaptive"]),
        (["--method", "adaptive", "--window", 3], ["--window 3", "--method adaptive", "leave out"]),
        (["--ngram", 3, "--budget", 9], ["--ngram 3", "--ngram 3", "--budget 9", "leave out"]),
        (["--guesses", 3, "--memory", "MEMORY"], ["--guesses 3", "--memory", "leave out"]),
        (["--memory", "none.memory"], ["'none.memory'", "lade warm"]),
        (["--memory", "."], ["'.'", "lade warm"]),
        (["--memory", "MEMORY"], ["damaged", "lade warm"]),
    ],
)
def test_contradictions_are_one_line(lade, folder, memory, command, arguments, words):
    arguments = [memory if argument == "MEMORY" else argument for argument in arguments]
    prompt = ["-p", PROMPT] if command == "generate" else []
    fails(lade(command, "-m", folder, *prompt, *arguments), *words)


@pytest.mark.parametrize(
    ("arguments", "ending"),
    [
        (["--method", "plain"], "· plain"),
        (["--method", "lookahead"], "· lookahead (7, 5, 7)"),
        (["--window", 3], "· lookahead (3, 5, 7)"),
        (["--method", "adaptive"], "· adaptive"),
        (["--budget", 6], "· adaptive, budget 6"),
    ],
)
def test_the_statistics_line_names_the_method(lade, folder, arguments, ending):
    said = lade("generate", "-m", folder, "-p", PROMPT, "-n", 8, *arguments).stderr
    assert any(line.endswith(ending) for line in said.splitlines())
