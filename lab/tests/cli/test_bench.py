"""`lade bench` as users run it, on a tiny model."""

import json
import re

import pytest
from huggingface_hub import HfApi
from pretend import not_found, torch_threads
from spies import answered
from test_cli_errors import fails

from lade.cli import loading
from lade_lab.cli import job
from lade_lab.cli import run as bench_run
from lade_lab.cli.run import duration
from lade_lab.harness import experiment as experiment_module
from lade_lab.harness.arms import OwnArm
from lade_lab.results import Results
from lade_lab.workloads import load

NEW = 8
METHODS = "hf,plain,adaptive-warm=8"
TEXTS = ["say it again", "one two", "say it again"]


@pytest.fixture(autouse=True)
def quick(monkeypatch, request):
    """Step curves are timed elsewhere; figures are drawn in one test only."""
    monkeypatch.setattr(experiment_module, "step_curve", lambda *args, **options: None)
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(bench_run, "_draw", lambda results, plan: ["results.json"])


@pytest.fixture
def drawn():
    """Draw the figures."""


@pytest.fixture
def bench(lade, folder, prompts, out):
    def run(*arguments, methods=METHODS):
        chosen = [] if "--methods" in arguments else ["--methods", methods]
        return lade("bench", "-m", folder, "-w", prompts, *chosen, "--out", out, "-n", NEW, *arguments)

    return run


@pytest.fixture
def wrong(monkeypatch):
    """The plain loop gets its fourth token wrong."""

    def spoil(completion, arm, *_):
        if arm.method.kind == "plain":
            completion.tokens[3] = (completion.tokens[3] + 1) % 200

    answered(monkeypatch, OwnArm, "complete", spoil)


@pytest.mark.slow
def test_all_of_it(bench, out, folder, drawn):
    result = bench("--figures")
    assert result.exit_code == 0, result.output
    results = Results.load(out / "results.json")
    assert results.complete and len(results.samples) == 9 and results.mismatches == []
    assert (results.model.name, results.model.dtype, results.model.inflated_from) == (folder.name, "float32", None)
    assert results.command[0] == "lade"
    assert (results.workloads[0].name, results.workloads[0].prompts) == ("texts", 3)
    said = result.stderr
    assert f"{folder.name}, 0.0M float32 parameters on " in said
    assert "3 prompts of texts, at most 8 new tokens, greedily" in said
    assert "methods: hf, plain, adaptive-warm 8" in said and re.search(r"^about \d+ s$", said, re.M)
    assert re.search(r"\d pictures are in", said)
    for method in ("hf", "plain", "adaptive-warm"):
        assert method in result.stdout
    assert list(out.glob("*.svg"))
    assert not list(out.glob("*.memory"))


@pytest.mark.slow
def test_without_options_it_runs_offline_on_the_embedded_model(lade, tmp_path, monkeypatch):
    """With few tokens and prompts, which are options too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HfApi, "model_info", None)
    result = lade("bench", "--limit", 1, "-n", 6)
    assert result.exit_code == 0, result.output
    results = Results.load(tmp_path / "bench-results" / "embedded" / "results.json")
    assert [method.name for method in results.methods] == [
        "hf", "hf-prompt-lookup", "plain", "jacobi", "prompt-lookup", "suffix", "lookahead",
        "adaptive 8", "adaptive 16", "adaptive 32", "adaptive", "adaptive-warm",
    ]  # fmt: skip
    assert results.workloads == [load("builtin", limit=1).record]
    assert results.environment.threads == 1 and not any(method.packed for method in results.methods)
    assert results.settings.max_new_tokens == 6 and len(results.samples) == 12


def test_json(bench, out):
    result = bench("--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["out"] == str(out) and report["complete"] is True and report["mismatches"] == []
    assert report["reference"] == "hf" and report["model"]["dtype"] == "float32"
    assert [row["method"] for row in report["blocks"][0]["rows"]] == ["hf", "plain", "adaptive-warm 8"]


def test_a_mismatch_is_told_and_is_exit_code_1(bench, wrong, tokenizer):
    for allowed in ([], ["--allow-near-ties", "--resume"]):
        result = bench(*allowed)
        assert result.exit_code == 1, result.output
        lines = [line for line in result.stderr.splitlines() if line.startswith("differs: ")]
        assert len(lines) == 3
        assert lines[0].startswith("differs: texts ") and "at new token 3 plain has" in lines[0]
        assert "hf has" in lines[0] and "score" in lines[0] and lines[0].endswith("NOT explained by rounding")
    report = json.loads(bench("--resume", "--json").stdout)
    assert [mismatch["place"] for mismatch in report["mismatches"]] == [3, 3, 3]


def test_near_ties_are_exit_code_1_unless_they_are_allowed(bench, wrong, monkeypatch):
    monkeypatch.setattr("lade_lab.harness.mismatch.NEAR_ULPS_OTHERWISE", float("inf"))
    result = bench()
    assert result.exit_code == 1 and "a near tie" in result.stderr
    assert bench("--resume", "--allow-near-ties").exit_code == 0


@pytest.mark.slow
def test_ctrl_c_and_going_on(bench, out, interrupting):
    whole = bench("--json", "--out", out.with_name("whole"))
    interrupting |= {"answers": 0, "at": 6}  # two of the warm-up, two of the first prompt, one of the second
    result = bench()
    assert result.exit_code == 130, result.output
    assert f"interrupted: 1 of 3 prompts are in {str(out)!r}; the same command with --resume continues" in result.stderr
    assert "Traceback" not in result.stderr
    kept = Results.load(out / "results.json")
    assert not kept.complete and len(kept.samples) == 3
    fails(bench(), out, "--resume", "--out")
    again = bench("--resume", "--json")
    assert again.exit_code == 0, again.output
    assert "continuing after 1 of 3 prompts" in again.stderr
    steps = [[row["steps"] for row in json.loads(r.stdout)["blocks"][0]["rows"]] for r in (whole, again)]
    assert steps[0] == steps[1]


def test_complete_results_are_reported_again_without_a_model(bench, lade, out, prompts, monkeypatch, folder):
    first = bench()
    monkeypatch.setattr(loading, "load", None)
    again = bench("--resume")
    assert again.exit_code == 0 and again.stdout == first.stdout and "is complete: reported again" in again.stderr
    fails(bench("--resume", "-n", NEW + 1), "settings.max_new_tokens", "is 9 here", "8")
    fails(bench("--resume", methods="hf"), "methods", "adaptive-warm 8")
    fails(bench("--resume", "--limit", 2), "workloads 1.prompts")
    prompts.write_text(prompts.read_text().replace("one", "ten"))
    fails(bench("--resume"), "workloads 1.sha256")


@pytest.mark.slow
def test_packed_weights(bench, out, request):
    assert bench("--pack").exit_code == 0, "no layer of it is large enough, and nothing is copied"
    assert not any(method.packed for method in Results.load(out / "results.json").methods)
    request.getfixturevalue("small_layers_count")
    for number, (option, packed) in enumerate([("--pack", True), ("--no-pack", False)]):
        result = bench(option, "--out", out.with_name(f"out{number}"), "--allow-near-ties")
        assert result.exit_code == 0, result.output
        methods = Results.load(out.with_name(f"out{number}") / "results.json").methods
        assert [method.packed for method in methods] == [False, packed, packed]


def test_inflated(bench, out, folder):
    result = bench("--inflate", "300e3", "--limit", 1, methods="hf,plain")
    assert result.exit_code == 0, result.output
    results = Results.load(out / "results.json")
    assert abs(results.model.parameters - 300e3) < 0.03 * 300e3
    assert results.model.inflated_from < 100e3
    assert results.model.name == folder.name


def test_threads(bench, out):
    with torch_threads() as before:
        assert bench("--threads", before + 1, "--limit", 1, methods="plain").exit_code == 0
    assert Results.load(out / "results.json").environment.threads == before + 1


def test_a_draft_model(bench, out, folder, templated):
    result = bench("--draft", folder, methods="hf,hf-assisted,plain")
    assert result.exit_code == 0, result.output
    results = Results.load(out / "results.json")
    assert results.model.draft == folder.name
    assert all(sample.steps < NEW - 1 for sample in results.of("hf-assisted"))


def test_sampling(bench, out):
    result = bench("--temperature", 1.2, "--seed", "3,4", "--top-k", 30, "--top-p", 0.9, methods="hf,plain,adaptive")
    assert result.exit_code == 0, result.output
    assert "3 prompts of texts, 2 times each, at most 8 new tokens, at temperature 1.2" in result.stderr
    results = Results.load(out / "results.json")
    assert (results.settings.temperature, results.settings.seeds) == (1.2, [3, 4])
    assert (results.settings.top_k, results.settings.top_p) == (30, 0.9)
    assert len(results.samples) == 18 and results.mismatches == []


@pytest.mark.slow
def test_figures_are_drawn_only_if_asked_for_and_without_matplotlib_that_is_refused_at_once(
    bench, out, drawn, monkeypatch
):
    not_found(monkeypatch, job)
    fails(bench("--figures"), "matplotlib is not installed: in the checkout of lade, run pip install")
    assert not out.exists()
    result = bench()
    assert result.exit_code == 0 and "results.json and 2 pictures are in" in result.stderr
    made = ["results.json", "speedup.png", "speedup.svg"]
    assert sorted(file.name for file in out.iterdir()) == made
    assert result.stdout.splitlines()[-1].startswith(("Use ", "Stay ", "No verdict: "))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "hf,magic"], ["magic", "give one of hf, hf-prompt-lookup"]),
        (["--methods", "token-recycling=0"], ["--methods token-recycling=0", "B=0", ">= 1"]),
        (["--draft", "x"], ["hf-assisted"]),
        (["--seed", "1,x"], ["--seed", "0,1,2"]),
        (["--top-k", 3], ["--top-k 3", "temperature"]),
        (["--temperature", -1], ["--temperature -1.0"]),
        (["--temperature", 1, "--top-p", 2], ["--top-p 2", "<= 1"]),
        (["-n", 0], ["--max-new-tokens 0", ">= 1"]),
        (["--threads", 0], ["--threads 0", ">= 1"]),
        (["--limit", 0], ["limit=0", "at least 1"]),
        (["--format", "x"], ["'x'"]),
        (["-w", "missing.jsonl"], ["missing.jsonl", "does not exist"]),
        (["-m", "missing/folder/of/model"], ["missing/folder/of/model", "does not exist"]),
        (["--inflate", 5], ["--inflate 5", "at least as many"]),
        (["--inflate", "1e30"], ["--inflate 1e+30", "memory", "give fewer"]),
    ],
)
def test_bad_input_is_one_line(bench, out, arguments, words):
    fails(bench(*arguments), *words)
    assert not out.exists()


def test_an_unsupported_model_is_refused_before_anything_is_run(lade, unsupported, prompts, out):
    arguments = ["bench", "-m", unsupported, "-w", prompts, "--out", out, "-n", NEW]
    fails(lade(*arguments, "--methods", "hf,plain,adaptive"), "GPTNeoForCausalLM", "leave out plain, adaptive")
    assert not out.exists()
    assert lade(*arguments, "--methods", "hf").exit_code == 0


def test_options_before_a_subcommand_are_not_lost(lade, folder):
    fails(lade("bench", "-m", folder, "compare", "a.json", "b.json"), "--model stands before compare")
    assert lade("bench", "compare", "--help").exit_code == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (89.4, "89 s"), (90, "2 min"), (3600, "60 min"), (7800, "2 h 10 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_a_line_now_and_then_where_there_is_no_terminal(bench, monkeypatch):
    monkeypatch.setattr(bench_run, "LINE_EVERY_S", 0.0)
    lines = [line for line in bench().stderr.splitlines() if line.endswith(" left")]
    assert [line.split(",")[0] for line in lines] == ["1 of 3 prompts", "2 of 3 prompts"]


@pytest.mark.slow
def test_many_prompts_at_a_time(lade, folder, prompts):
    arguments = ["bench", "-m", folder, "-w", prompts, "-n", NEW]
    result = lade(*arguments, "--batch-size", "1,3")
    assert result.exit_code == 0, result.output
    assert "1 rows" in result.stdout and "3 rows" in result.stdout and "engine, adaptive-warm" in result.stdout
    found = json.loads(lade(*arguments, "--arrivals", 100, "--json").stdout)
    (measured,) = found["measured"]
    assert (measured["rows"], measured["arrivals_per_s"], len(measured["arms"])) == (8, 100.0, 4)
    assert all(arm["latency_median_s"] > 0 and arm["parting"] == 0 for arm in measured["arms"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch-size", "0"], ["batch-size", ">= 1"]),
        (["--batch-size", "x"], ["batch-size", "4,8"]),
        (["--arrivals", "0"], ["arrivals", "> 0"]),
        (["--arrivals", "nan"], ["arrivals", "> 0"]),
        (["--batch-size", "2", "--methods", "hf"], ["--methods", "leave it out"]),
        (["--batch-size", "2", "--temperature", "1"], ["--temperature", "leave it out"]),
        (["--arrivals", "2", "--resume"], ["--resume", "leave it out"]),
    ],
)
def test_options_that_many_prompts_have_no_use_for(lade, folder, prompts, arguments, words):
    fails(lade("bench", "-m", folder, "-w", prompts, *arguments), *words)
