"""`--pack` and `--no-pack`: said nothing of, models are packed on the CPU where that pays."""

import pytest

from lade.cli.loading import load
from lade.cli.options.model import Loading
from lade.cli.terminal import terminal
from lade.tuning import packing_choice

PROMPT = "say it again, say it"
GENERATE = ["-p", PROMPT, "-n", 8]


@pytest.fixture(params=[True])
def it_pays(request, monkeypatch):
    monkeypatch.setattr(packing_choice, "pays", lambda before, after: request.param)


def loaded(name, **options):
    with terminal() as term:
        return load(Loading(name, dtype=options.pop("dtype", "float32"), device="cpu"), term=term, **options)


@pytest.mark.slow
def test_on_the_cpu_models_are_packed_unless_one_says_no(report, folder, small_layers_count, it_pays):
    reports = [report("generate", "-m", folder, *GENERATE, *more) for more in ([], ["--pack"], ["--no-pack"])]
    assert [report["packed"] for report in reports] == [True, True, False]
    assert len({report["text"] for report in reports}) == 1


def test_a_packed_model_writes_the_tokens_of_plain_generate(report, folder, plain, tokenizer, small_layers_count):
    for method in ("plain", "lookahead"):
        found = report("generate", "-m", folder, "-p", PROMPT, "-n", 40, "--method", method, "--pack")
        assert found["packed"] and found["token_ids"] == plain(tokenizer(PROMPT)["input_ids"], 40)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_what_cannot_be_packed_is_an_error_only_where_it_was_asked_for(lade, folder, small_layers_count, command):
    arguments = [command, "-m", folder, "--dtype", "float64", *(GENERATE if command == "generate" else [])]
    result = lade(*arguments, stdin="/quit\n")
    assert result.exit_code == 0 and "pack" not in result.stderr
    result = lade(*arguments, "--pack", stdin="/quit\n")
    assert result.exit_code == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: layer ") and "float64" in line and "float32" in line


@pytest.mark.parametrize("it_pays", [False], indirect=True)
def test_what_would_be_slower_is_packed_only_if_one_says_so(report, folder, small_layers_count, it_pays):
    arguments = ["generate", "-m", folder, *GENERATE]
    assert [report(*arguments, *more)["packed"] for more in ([], ["--pack"])] == [False, True]
    model = report("doctor", "-m", folder, "--seconds", 0.1)["model"]
    assert model["not_packed"].startswith("its steps would be slower: 1 tokens")


def test_chat_says_so(lade, folder, small_layers_count, it_pays):
    assert "float32, packed ·" in lade("chat", "-m", folder, stdin="/quit\n").stderr
    assert "packed" not in lade("chat", "-m", folder, "--no-pack", stdin="/quit\n").stderr


def test_the_embedded_model_is_packed_only_if_one_says_so_and_small_ones_never(folder, request):
    assert [loaded(None, pack=pack).facts["packed"] for pack in (None, False, True)] == [False, False, True]
    assert not loaded(str(folder), pack=True).facts["packed"]
    request.getfixturevalue("small_layers_count")
    assert not loaded(str(folder)).facts["packed"], "loading alone packs nothing"
