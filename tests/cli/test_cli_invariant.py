"""`--invariant`: in bfloat16, too, the text is plain decoding's."""

import pytest
from spies import failing

from lade import machine
from lade.backends.cpu.invariant_marker import invariance_of
from lade.cli.loading import load as load_model
from lade.cli.options.decoding import Output, Speed
from lade.cli.options.model import Loading
from lade.cli.serve import load_served
from lade.cli.terminal import Terminal
from lade.errors import UnsupportedModelError
from lade_lab.results import Results

pytestmark = pytest.mark.usefixtures("rounds_alike")

PROMPT = "say it again, say it"
HALF = ["--dtype", "bfloat16"]


@pytest.mark.slow
def test_generate_writes_what_plain_decoding_writes(report, folder):
    arguments = ["generate", "-m", folder, *HALF, "-p", PROMPT, "-n", 24, "--invariant"]
    texts = [report(*arguments, *more)["token_ids"] for more in ([], ["--method", "plain"])]
    assert texts[0] == texts[1] and len(texts[0]) == 24


@pytest.mark.parametrize("command", ["generate", "chat", "doctor", "bench", "serve"])
def test_an_attention_that_would_be_replaced_and_a_dtype_that_cannot_be_are_errors(lade, folder, command):
    result = lade(command, "-m", folder, "--invariant", "--attn-implementation", "eager")
    assert result.exit_code == 2 and "--invariant" in result.stderr
    if command == "generate":
        result = lade(command, "-m", folder, "--dtype", "float64", "-p", PROMPT, "--invariant")
        assert result.exit_code == 2 and "cannot be made invariant" in result.stderr


def loaded(folder, dtype, **wanted):
    term = Terminal(Output(quiet=True))
    return load_model(Loading(model=str(folder), dtype=dtype), term=term, **{"pack": None, "invariant": None, **wanted})


@pytest.mark.parametrize(
    ("dtype", "wanted", "made"),
    [("bfloat16", None, True), ("float16", None, True), ("float32", None, False), ("bfloat16", False, False)],
)
def test_a_model_in_16_bits_is_invariant_unless_that_is_unwanted(folder, dtype, wanted, made):
    model = loaded(folder, dtype, invariant=wanted).model
    assert (invariance_of(model) is not None) == made


def test_packing_changes_no_bits_unasked(folder, monkeypatch):
    """Packing alone changes the texts of a model in 16 bits."""
    asked = []
    monkeypatch.setattr(machine, "pack_if_it_pays", asked.append)
    monkeypatch.setattr(machine.packing, "pack", lambda model, **given: asked.append(given))
    loaded(folder, "bfloat16", invariant=False)
    assert not asked
    loaded(folder, "bfloat16", invariant=False, pack=True)
    assert asked == [{"panels": False}]
    loaded(folder, "float32")
    assert len(asked) == 2


def test_a_model_that_cannot_be_invariant_keeps_its_kernels(folder, monkeypatch, capsys):
    problem = UnsupportedModelError("it rounds by the phase of the moon", "wait")
    failing(monkeypatch, machine.make_invariant, "invariant", problem)
    term = Terminal(Output())
    found = load_model(Loading(model=str(folder), dtype="bfloat16"), term=term, pack=None, invariant=None)
    assert invariance_of(found.model) is None and not found.facts["packed"]
    assert "by the phase of the moon" in capsys.readouterr().err
    with pytest.raises(UnsupportedModelError, match="phase"):
        loaded(folder, "bfloat16", invariant=True)


def test_a_server_makes_its_model_invariant(folder):
    loading = Loading(model=str(folder), dtype="bfloat16")
    served = [
        load_served(loading, Speed(invariant=wanted), None, Terminal(Output(quiet=True))) for wanted in (True, False)
    ]
    assert [invariance_of(each.model) is not None for each in served] == [True, False]


def test_a_benchmark_of_an_invariant_model_allows_no_near_ties(lade, folder, tmp_path):
    result = lade("bench", "-m", folder, "--invariant", "--allow-near-ties", "--out", tmp_path / "out")
    assert result.exit_code != 0 and "an invariant model has none" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("pack", ["--pack", "--no-pack"])
def test_a_benchmark_in_16_bits_finds_no_difference(lade, folder, tmp_path, prompt_lines, pack):
    prompts = prompt_lines(*(f"{PROMPT} {number}" for number in range(3)))
    methods = "hf,hf-prompt-lookup,plain,lookahead=3,4,5,adaptive=8"
    options = ["-w", prompts, "--methods", methods, "--out", tmp_path / "out", "-n", 40, "--invariant", pack]
    result = lade("bench", "-m", folder, *HALF, *options)
    assert result.exit_code == 0, result.output
    results = Results.load(tmp_path / "out" / "results.json")
    assert results.mismatches == [] and results.model.name.endswith(" (invariant)")
