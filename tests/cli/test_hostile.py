"""Command lines that nobody means well: one line, exit code 2, at once, whatever they ask for."""

import errno

import pytest
import torch
from spies import failing
from test_cli_errors import fails

from lade.cli import terminal as module
from lade.cli.generate import Asked
from lade.cli.loading import from_pretrained
from lade.cli.terminal import terminal

DEEP = "[" * 100_000
HUGE = str(10**30)
DIGITS = "9" * 5000  # more than Python reads
LONG = "a" * 5000  # longer than a name of a file may be


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    """All of it is found out before a model is."""
    failing(monkeypatch, from_pretrained.AutoModelForCausalLM, "from_pretrained", AssertionError("a model is loaded"))


@pytest.fixture
def files(tmp_path):
    """Files by the names that command lines have for them."""
    texts = {
        "PROMPTS.jsonl": '{"prompt": "one"}\n',
        "DEEP.jsonl": f'{{"prompt": {DEEP}\n',
        "DEEP.json": DEEP,
        "DIGITS.jsonl": f'{{"prompt": {DIGITS}}}\n',
        "ANSWERS.jsonl": DEEP + "\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: tmp_path / name for name in (*texts, "OUT")}


GENERATE = ["generate", "-p", "x"]
MANY = ["batch", "-i", "PROMPTS.jsonl"]
BENCH = ["bench", "--out", "OUT"]
SCALING = ["bench", "scaling", "--out", "OUT"]
WARM = ["warm", "--prompts", "PROMPTS.jsonl", "--out", "OUT"]
CASES = [
    ([*GENERATE, "--budget", "10000000000"], ["--budget 10000000000", "<= 1024"]),
    ([*GENERATE, "--window", "99999999999"], ["--window 99999999999", "<= 256"]),
    ([*GENERATE, "--guesses", HUGE], [f"--guesses {HUGE}", "<= 256"]),
    ([*GENERATE, "--ngram", "99999"], ["--ngram 99999", "<= 32"]),
    ([*GENERATE, "--num-beams", "100000"], ["--num-beams 100000", "<= 256"]),
    ([*GENERATE, "--do-sample", "--temperature", "1e-320"], ["--temperature 1e-320", "1e-10"]),
    ([*GENERATE, "--do-sample", "--temperature", "nan"], ["--temperature nan"]),
    ([*GENERATE, "--do-sample", "--temperature", "inf"], ["--temperature inf"]),
    ([*GENERATE, "--do-sample", "--top-p", "nan"], ["--top-p nan"]),
    ([*GENERATE, "--do-sample", "--min-p", "-inf"], ["--min-p -inf"]),
    ([*GENERATE, "--do-sample", "--seed", HUGE], ["--seed"]),
    ([*GENERATE, "--repetition-penalty", "1e-320"], ["--repetition-penalty 1e-320", "0.01"]),
    ([*GENERATE, "--repetition-penalty", "1e308"], ["--repetition-penalty 1e+308", "100"]),
    ([*GENERATE, "-n", HUGE], [f"--max-new-tokens {HUGE}", "<= 1000000000"]),
    ([*GENERATE, "--stop", "y" * 100_000], ["--stop yyyy", "at most 200"]),
    ([*GENERATE, "-m", "~nobody-of-that-name/x"], ["does not exist"]),
    ([*GENERATE, "-m", "a\nb"], ["does not exist"]),
    ([*GENERATE, "-m", LONG], ["File name too long"]),
    ([*GENERATE, "--memory", LONG], ["File name too long"]),
    ([*GENERATE, "--device", "meta"], ["--device meta"]),
    ([*GENERATE, "--device", "cuda:-1"], ["--device cuda:-1"]),
    ([*GENERATE, "--chat-template-kwargs", DEEP], ["--chat-template-kwargs", "JSON"]),
    ([*GENERATE, "--system", "\ud800"], ["--system", "UTF-8"]),
    (["generate", "--prompts", "DEEP.jsonl"], ["line 1", "JSON", "recursion"]),
    (["generate", "--prompts", "DIGITS.jsonl"], ["line 1", "JSON"]),
    (["generate", "--prompts", LONG], ["cannot be read: File name too long"]),
    ([*MANY, "-o", LONG], ["File name too long"]),
    ([*MANY, "-o", "ANSWERS.jsonl", "--resume"], ["damaged at line 1", "recursion"]),
    ([*WARM, "--prompts", "DEEP.jsonl"], ["line 1", "JSON"]),
    ([*WARM, "--max-mib", "-" + HUGE], ["--max-mib -"]),
    (["doctor", "--cached", HUGE], [f"--cached {HUGE}", "<= 1000000"]),
    (["doctor", "--seconds", "1e308"], ["--seconds 1e+308", "<= 86400"]),
    (["doctor", "--seconds", "nan"], ["--seconds nan"]),
    (["doctor", "--threads", "100000"], ["--threads 100000", "<= "]),
    (["demo", "--max-new-tokens", "-1"], ["--max-new-tokens -1"]),
    ([*BENCH, "--repeats", "1000000000000"], ["--repeats 1000000000000", "<= 10000"]),
    ([*BENCH, "--seed", DIGITS, "--temperature", "1"], ["--seed 999"]),
    ([*BENCH, "--temperature", "1e-320"], ["--temperature 1e-320"]),
    ([*BENCH, "--methods", "jacobi=999999"], ["K=999999", "<= 127"]),
    ([*BENCH, "--methods", f"jacobi={DIGITS}"], ["--methods jacobi=999"]),
    ([*BENCH, "--methods", "adaptive=99999"], ["B=99999", "<= 1024"]),
    ([*BENCH, "--prompts", "DEEP.jsonl"], ["line 1", "JSON"]),
    ([*BENCH, "--threads", "99999999999"], ["--threads 99999999999"]),
    (["bench", "compare", "DEEP.json", "DEEP.json"], ["cannot read", "recursion"]),
    ([*SCALING, "--windows", DIGITS], ["--windows 999"]),
    ([*SCALING, "-n", HUGE], [f"--max-new-tokens {HUGE}"]),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("words", "named"), CASES, ids=lambda value: " ".join(value)[:60])
def test_it_is_refused_in_one_line(lade, files, words, named):
    fails(lade(*(files.get(word, word) for word in words)), *named)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (MemoryError("74 GiB"), ["out of memory", "74 GiB"]),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), ["out of memory"]),
        (torch.OutOfMemoryError("CUDA out of memory"), ["out of memory", "CUDA"]),
        (OSError(28, "No space left on device", "out.jsonl"), ["No space left on device", "disk space"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_machine_that_is_full_is_one_line(capsys, problem, words):
    with pytest.raises(module.typer.Exit) as ended, terminal():
        raise problem
    assert ended.value.exit_code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words)


@pytest.mark.parametrize("problem", [RuntimeError("a bug"), KeyError("x"), BrokenPipeError()], ids=repr)
def test_a_bug_is_not_called_an_error_of_the_user(problem):
    with pytest.raises(type(problem)), terminal():
        raise problem


def test_a_reader_that_goes_away_is_no_error(lade, monkeypatch):
    """As `head` does: the frame of all commands ends with it, without a word."""
    failing(monkeypatch, Asked, "read", BrokenPipeError(errno.EPIPE, "Broken pipe"))
    result = lade(*GENERATE)
    assert (result.exit_code, result.output) == (1, "")
