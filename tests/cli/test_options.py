"""What `--method`, the sizes, `--budget` and `--memory` mean together."""

from pathlib import Path

import pytest
from test_cli_errors import fails

from lade import LookaheadConfig
from lade.cli.options.decoding import Speed

PROMPT = "say it again, say it"


PAPER, SIZES = (None, "auto", "lookahead"), {"window": 7, "ngram": 5, "guesses": 7}
ADAPTIVE, MEMORY = (None, "auto", "adaptive"), Path(__file__)


@pytest.mark.parametrize(
    ("methods", "given", "meant"),
    [
        ((None, "auto"), {}, "auto"),
        (("plain",), {}, None),
        (("lookahead",), {}, LookaheadConfig(adaptive=False)),
        (PAPER, {"window": 3, "guesses": 0}, LookaheadConfig(window=3, guesses=0)),
        (PAPER, SIZES, LookaheadConfig(7, 5, 7)),  # the defaults are sizes too
        (("adaptive",), {}, LookaheadConfig()),
        (ADAPTIVE, {"budget": 9}, LookaheadConfig(budget=9)),
        (ADAPTIVE, {"memory": MEMORY}, LookaheadConfig()),
        (ADAPTIVE, {"budget": 1, "memory": MEMORY}, LookaheadConfig(budget=1)),
    ],
)
def test_sizes_imply_lookahead_and_a_budget_or_a_memory_the_adaptive_method(methods, given, meant):
    for method in methods:
        found = Speed(method, **given).lookahead()
        assert found == meant and getattr(found, "adaptive", None) == getattr(meant, "adaptive", None)


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
def test_contradictions_are_one_line(lade, folder, tmp_path, command, arguments, words):
    (memory := tmp_path / "texts.memory").write_bytes(b"")
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
