"""The folder `benchmarks`: its pages say what its results say, and its scripts run what they list."""

import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer.main
from made_results import METHODS, made_results

from lade.cli.main import app
from lade_lab.harness.benchmark import command_line
from lade_lab.harness.methods import check_settings, parse_all
from lade_lab.results import Environment, Model, Settings, Workload
from lade_lab.scaling_law import Point, Reference, Scaling
from lade_lab.summary import summarise

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "benchmarks"
GPU = FOLDER / "gpu" / "run.sh"


@pytest.fixture(scope="module")
def scripts():
    """The modules of the folder, which is no package."""
    names = ("catalogue", "run", "summarize")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        del sys.modules[name]


def law(windows=(1, 4)):
    points = [Point(w, n, w, [10], [10 * w * n], [12 + w + n]) for n in (3, 5) for w in windows]
    return Scaling(
        "2026-01-02T03:04:05+00:00", ["lade", "bench", "scaling"], Environment("a machine", 1, {}, "Linux", None),
        Model("small", "llama", 1, "float32"), Settings(8), Workload("toys", "jsonl", 1), True,
        [Reference("a", "0", 8, "0")], points, complete=True,
    )  # fmt: skip


def named(name):
    """A run whose methods are called as they are when no sizes are given."""
    methods = [method for method in METHODS if method.name != "lookahead 15,5,15"]
    results = made_results(3, methods=methods, workloads=("humaneval",))
    text = json.dumps(results, default=vars).replace("lookahead 7,5,7", "lookahead").replace("stories3M-hf", name)
    return {"schema": "lade-bench/1", **json.loads(text)}


@pytest.fixture
def copied(tmp_path):
    """Pages without results, in a folder of their own."""
    for page in FOLDER.rglob("README.md"):
        target = tmp_path / page.relative_to(FOLDER)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, target)
    return tmp_path


# Pages


def test_the_pages_say_what_the_results_say(scripts):
    stale = [str(page) for page in scripts.summarize.pages() if page.read_text("utf-8") != scripts.summarize.made(page)]
    assert stale == [], "run python benchmarks/summarize.py"


def test_without_results_there_are_no_figures(scripts, copied):
    scripts.summarize.write_pages(copied)
    assert scripts.summarize.write_pages(copied) == []
    for page in scripts.summarize.pages(copied):
        between = "".join(re.findall(r"<!-- \w+: \S+ -->\n(.*?)<!-- end -->", page.read_text("utf-8"), re.DOTALL))
        assert set(between.split("\n")) <= {"", "Not run yet."}
    overview = (copied / "README.md").read_text("utf-8")
    assert overview.count("not run yet") == len(scripts.catalogue.BENCHMARKS) + 2


def cells_of(folder, name):
    """Cells of a benchmark's line in the overview."""
    (line,) = re.findall(rf"^\| \[{name}\].*$", (folder / "README.md").read_text("utf-8"), re.M)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_results_become_tables_and_pictures(scripts, copied):
    folder = copied / "sampling" / "temperature-0.7"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(named("tiny")))
    (folder / "trade.svg").touch()
    scripts.summarize.write_pages(copied)

    page = (copied / "sampling" / "README.md").read_text("utf-8")
    assert "Run on 2026-01-02:" in page and "lade bench --model tiny --prompts 'my prompts/human eval.jsonl'" in page
    assert "\n| adaptive-warm | equal |" in page and "DIFFER" in page and page.count("Not run yet.") == 1
    assert page.count("![") == page.count("](temperature-0.7/trade.svg)") == 1

    results = scripts.summarize.Results.load(folder / "results.json")
    row = summarise(results).overall.row("adaptive-warm")
    expected = f"{row.speedup.each.median:.2f} (S {row.tokens_per_step:.2f})"
    cells = cells_of(copied, "sampling/temperature-0.7")
    assert cells[-1] == expected and cells[0].endswith("(sampling/README.md)")
    assert cells[2] == "1 of 18 DIFFER" and cells[3] == f"{summarise(results).overall.row('hf').decode_rate.median:.1f}"
    assert cells[5] == f"{summarise(results).overall.row('plain').speedup.each.median:.2f}"


def test_losses_near_ties_and_interrupted_runs_are_told(scripts, copied):
    found = named("tiny")
    found["mismatches"] = [each for each in found["mismatches"] if each["near_tie"]]
    found["complete"] = False
    for sample in found["samples"]:
        if sample["method"] == "adaptive":
            sample["seconds"] *= 100
    found["methods"] = [method for method in found["methods"] if method["kind"] != "hf-prompt-lookup"]
    (copied / "smollm2-135m" / "results.json").write_text(json.dumps(found))
    scripts.summarize.write_pages(copied)
    assert "Run on 2026-01-02, interrupted:" in (copied / "smollm2-135m" / "README.md").read_text("utf-8")
    cells = cells_of(copied, "smollm2-135m")
    assert cells[2] == "incomplete; 1 of 15 diverge at near ties" and cells[4] == "-" and cells[7].startswith("▼ 0.0")


def test_the_scaling_law_becomes_tables(scripts, copied):
    law().save(copied / "scaling" / "scaling.json")
    scripts.summarize.write_pages(copied)
    page = (copied / "scaling" / "README.md").read_text("utf-8")
    assert "| W | N = 3 | N = 5 |" in page and "| 4 | 1.900 (12) | 2.100 (20) |" in page
    assert "| 3 | 1.362 | 0.150 | 1.000 |" in page and "\n| all | - | - | - |" in page
    assert "all 4 answers equal plain decoding's" in page
    assert "S grows by 0.15 to 0.15 with each doubling" in (copied / "README.md").read_text("utf-8")


def test_a_changed_figure_is_noticed(scripts, copied, capsys):
    (copied / "smollm2-135m" / "results.json").write_text(json.dumps(named("tiny")))
    assert scripts.summarize.main([], copied) == 0
    assert scripts.summarize.main(["--check"], copied) == 0
    page = copied / "smollm2-135m" / "README.md"
    changed, places = re.subn(r"(\| adaptive-warm \| equal \| \d\.\d)\d", r"\g<1>x", page.read_text("utf-8"))
    page.write_text(changed)
    assert places == 1 and scripts.summarize.main(["--check"], copied) == 1
    assert "not what the results say: smollm2-135m/README.md" in capsys.readouterr().out


def test_every_benchmark_has_a_page_that_shows_it_and_says_its_command(scripts):
    for benchmark in scripts.catalogue.BENCHMARKS:
        page = FOLDER / benchmark.name / "README.md"
        page = page if page.exists() else page.parent.parent / "README.md"
        text, file = page.read_text("utf-8"), (FOLDER / benchmark.results).relative_to(page.parent)
        assert re.search(rf"<!-- (results|scaling): {re.escape(str(file))} -->", text), benchmark.name
        (command,) = re.findall(r"^    python benchmarks/run.py .*$", text, re.M)
        assert benchmark.name in command.split()
        assert ("--models FOLDER --data FOLDER" in command) == bool(benchmark.model)


def test_links_lead_somewhere_and_results_say_nothing_of_the_folders_of_a_machine():
    for page in FOLDER.rglob("README.md"):
        for link in re.findall(r'\]\(([^)#]+)\)|(?:src|srcset)="([^"]+)"', page.read_text("utf-8")):
            target = link[0] or link[1]
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page}: {target}"
    for file in (*FOLDER.rglob("results.json"), *FOLDER.rglob("scaling.json")):
        assert not re.search(r'"(--[\w-]+=)?(/|~|[A-Za-z]:\\)', file.read_text("utf-8")), file


# Running


def test_commands_are_recorded_without_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in" / "here").mkdir(parents=True)
    given = ["lade", "bench", "--model", str(tmp_path / "model"), "--out=/a/b/c", "-w", "../x/p.jsonl#story", "~/y/z"]
    kept = ["org/name", "--limit", "3", "--methods", "lookahead=15,5,15,adaptive", "nowhere/new", "1e9", ".", "/"]
    shortened = ["lade", "bench", "--model", "model", "--out=c", "-w", "p.jsonl#story", "z", "here"]
    assert command_line([*given, "in/here", *kept]) == [*shortened, *kept]


def test_the_commands_are_valid(scripts, tmp_path):
    command = typer.main.get_command(app)
    for benchmark in scripts.catalogue.BENCHMARKS:
        words = benchmark.words(Path("models"), Path("data"), tmp_path)
        context = command.commands["bench"].make_context("bench", words[1:])
        if benchmark.command == "bench":
            told = context.params
            sampling = told["temperature"] is not None
            assert parse_all(told["methods"] or ["hf"], sampling=sampling)
            seeds = [int(seed) for seed in told["seeds"].split(",")]
            check_settings(Settings(told["max_new_tokens"], temperature=told["temperature"], seeds=seeds))
        assert {"--resume", "--figures"} <= set(words) and words[words.index("--out") + 1] == str(tmp_path)
        assert (str(Path("models") / benchmark.model) in words) == bool(benchmark.model)
        assert words.count("--prompts") == len(benchmark.prompts)
    names = [benchmark.name for benchmark in scripts.catalogue.BENCHMARKS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["frobnicate"], "no benchmark frobnicate: give all, or some of embedded-code, "),
        (["scaling"], "give the folder with SmolLM2-135M-Instruct.gguf as --models; see README.md"),
        (["all", "--models", "nowhere"], "SmolLM2-135M-Instruct.gguf, Qwen2.5-Coder-0.5B-Instruct.gguf, "),
        (["embedded-code", "--quick"], "give --out with --quick"),
    ],
)
def test_what_cannot_be_run_is_refused(words, said, scripts, capsys):
    with pytest.raises(SystemExit) as end:
        scripts.run.main(words)
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_without_names_it_lists_them(scripts, tmp_path, capsys):
    (tmp_path / "embedded-code").mkdir()
    (tmp_path / "embedded-code" / "results.json").write_text('{"complete": true}')
    assert scripts.run.main(["--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [each.name for each in scripts.catalogue.BENCHMARKS]
    assert [line.split()[0] for line in lines if " complete " in line] == ["embedded-code"]


@pytest.fixture
def process(scripts, monkeypatch):
    """Stands for the processes that run benchmarks: how each wait for one ends, and the words that it had."""
    made = SimpleNamespace(ends=[], calls=[])

    def wait():
        end = made.ends.pop(0)
        if end is KeyboardInterrupt:
            raise end
        return end

    monkeypatch.setattr(scripts.run.subprocess, "Popen", lambda words: made.calls.append(words) or made)
    made.wait = wait
    return made


def given_folders(folder, scripts):
    """Options with folders that have all models and prompts, as files without content."""
    for benchmark in scripts.catalogue.BENCHMARKS:
        files = [folder / "data" / file for file in benchmark.prompts]
        for file in [*files, *([folder / "models" / benchmark.model] if benchmark.model else [])]:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    return ["--models", str(folder / "models"), "--data", str(folder / "data")]


def test_benchmarks_run_in_turn_and_a_difference_ends_nothing(scripts, process, tmp_path, capsys):
    process.ends = [1, 0]
    names = ["scaling", "embedded-code", "scaling"]
    folders = given_folders(tmp_path, scripts)
    (tmp_path / "embedded-code").mkdir()
    (tmp_path / "embedded-code" / "results.json").write_text('{"complete": true}')
    assert scripts.run.main([*names, *folders, "--out", str(tmp_path), "--quick"]) == 1
    assert [words[:4] for words in process.calls] == [[sys.executable, "-m", "lade", "bench"]] * 2
    first, second = process.calls
    assert first[first.index("--out") + 1] == str(tmp_path / "scaling") and first.count("--windows") == 2
    assert second[second.index("--out") + 1] == str(tmp_path / "embedded-code") and "--windows" not in second
    said = capsys.readouterr().out
    assert "1 of 2: scaling; about 4 min left in all" in said
    assert "2 of 2: embedded-code; about 0 min left in all" in said, "complete ones take no time"
    assert said.endswith("outputs differ: scaling\n")


def test_an_interruption_or_bad_input_ends_it_when_the_process_has_ended(scripts, process, tmp_path):
    process.ends = [KeyboardInterrupt, 130, 0]
    words = ["embedded-code", "scaling", *given_folders(tmp_path, scripts), "--out", str(tmp_path)]
    assert scripts.run.main(words) == 130
    assert process.ends == [0], "it did not wait for the process, or went on"
    process.ends = [2]
    assert scripts.run.main(words) == 2


@pytest.mark.slow
def test_one_is_run(scripts, tmp_path):
    words = [sys.executable, FOLDER / "run.py", "embedded-code", "--quick", "--out", tmp_path]
    subprocess.run(words, check=True, capture_output=True)
    assert scripts.run.complete(scripts.catalogue.BENCHMARKS[0], tmp_path)
    again = subprocess.run(words, check=True, capture_output=True, text=True)
    assert "about 0 min left" in again.stdout and "reported again" in again.stderr


# On a GPU


def gpu(*words):
    command = ["bash", GPU, "--python", sys.executable, *words]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--frob"], "no option --frob"),
        (["--size"], "--size needs a value"),
        (["--minutes", "soon"], "--minutes is 'soon': give a whole number"),
        (["--parts", "tests,frob"], "no part frob: give some of tests,steps,bits"),
        (["--wheels", "/none/such"], "no .whl files in /none/such"),
    ],
)
def test_the_script_for_gpus_refuses_what_it_does_not_know(words, said):
    run = gpu(*words)
    assert run.returncode == 2 and said in run.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_the_script_for_gpus_says_that_there_is_none(tmp_path):
    run = gpu(tmp_path / "out")
    assert run.returncode == 2 and "torch sees no GPU: give --device cpu" in run.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_single_passes_are_timed_beside_their_floors(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(GPU.parent)
    steps = importlib.import_module("steps")
    monkeypatch.setattr(steps, "ROUNDS_OF_FLOORS", 1)
    told = {"shape": "tiny", "device": "cpu", "dtype": "float32", "cached": 20, "sizes": "1,9", "rounds": 2, "rows": 2}
    told["out"] = tmp_path / "steps.json"
    assert steps.main([f"--{name}={value}" for name, value in told.items()]) == 0
    found = json.loads((tmp_path / "steps.json").read_text("utf-8"))
    one, nine = found["passes"]
    assert (one["padded"], nine["padded"]) == (1, 16) and nine["operations_floor_ms"] == 9 * one["operations_floor_ms"]
    small = steps.model_of("tiny", torch.float32, torch.device("cpu"))
    assert steps.weights_read(small) == small.num_parameters() - small.get_input_embeddings().weight.numel()
    assert found["bytes_read"] > 4 * found["weights"] and found["rows"] == 2
    for line, lane in ((line, lane) for line in found["passes"] for lane in steps.RUNNERS):
        device, wall = line[lane]["device_ms"], line[lane]["wall_ms"]
        assert 0 < device["p10"] <= device["median"] <= device["p90"] and device["median"] <= wall["median"]
    printed = capsys.readouterr().out
    assert "called again, not captured" in printed and (tmp_path / "steps.txt").read_text("utf-8") in printed


@pytest.mark.slow
def test_quantised_weights_are_measured_where_there_is_what_quantises_them(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(GPU.parent)
    quantised = importlib.import_module("quantised")

    def halve(model):  # what needs no library
        for *_, layer in quantised.linears(model):
            layer.weight.requires_grad_(False).data = layer.weight.data.half()
        model.half()

    def fail(model):
        raise NotImplementedError("no kernel here\nand more")

    def no_linear(model):
        for *_, layer in quantised.linears(model):
            layer.forward = lambda x, layer=layer: torch.nn.functional.linear(x, layer.weight).relu()

    way = quantised.Way
    ways = [*quantised.WAYS[:1], way("halves", halve), way("kernel", fail), way("refused", no_linear)]
    libraries = {way: way.name.partition("(")[2][:-1] for way in quantised.WAYS[1:]}
    ways += [way for way, library in libraries.items() if importlib.util.find_spec(library) is None]
    monkeypatch.setattr(quantised, "WAYS", ways)
    told = {"params": 5e6, "device": "cpu", "cached": 20, "sizes": "1,9", "rounds": 1, "out": tmp_path / "found.json"}
    assert quantised.main([f"--{name}={value}" for name, value in told.items()]) == 0
    found = {each["way"]: each for each in json.loads((tmp_path / "found.json").read_text("utf-8"))["ways"]}
    one, nine = found["bfloat16"]["passes"]
    assert one["break_even"] == 1 and nine["break_even"] == nine["device_ms"]["median"] / one["device_ms"]["median"]
    assert not found["bfloat16"]["replayed"] and found["bfloat16"]["weight_bytes"] == found["halves"]["weight_bytes"]
    assert found["kernel"]["missing"] == "NotImplementedError: no kernel here"
    assert "its layer 'model.layers.0.self_attn.q_proj' (Linear)" in found["refused"]["refused"]
    for name, each in list(found.items())[4:]:
        assert each["missing"].startswith("MissingError: "), name
    printed = capsys.readouterr().out
    assert printed.endswith((tmp_path / "found.txt").read_text("utf-8") + "\n") and "S(9)" in printed
    assert "not measured: NotImplementedError" in printed
    assert quantised.main(["--params=5e6", "--device=cpu", "--sizes=1", "--limit-s=-1"]) == 1
    assert "no time was left" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        quantised.main(["--sizes=8,16"])
    assert "give 1 first" in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_for_gpus_runs_without_one(tmp_path):
    common = ("--device", "cpu", "--size", "8e6", "--shapes", "tiny", "--quick")
    run = gpu(tmp_path / "out", *common)
    assert run.returncode == 0, run.stdout + run.stderr
    text = json.loads((tmp_path / "out" / "text" / "results.json").read_text("utf-8"))
    assert text["complete"] and len(text["methods"]) == 6
    assert not (tmp_path / "out" / "batches.txt").exists()
    run = gpu(tmp_path / "out", *common, "--parts", "sampled,batches")
    assert run.returncode == 0, run.stdout + run.stderr
    sampled = json.loads((tmp_path / "out" / "sampled" / "results.json").read_text("utf-8"))
    assert sampled["complete"] and len(sampled["methods"]) == 4
    assert "engine, adaptive-warm" in (tmp_path / "out" / "batches.txt").read_text("utf-8")
    steps = json.loads((tmp_path / "out" / "steps-tiny.json").read_text("utf-8"))
    assert [each["size"] for each in steps["passes"]] == [1, 8, 16, 32, 64] and not steps["captured"]
