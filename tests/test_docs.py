"""The documentation: links lead somewhere, commands exist, lists and reference agree with the code."""

import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from pretend import typed

import lade
from lade.cli.main import app
from lade.model.supports import MASK_PER_LAYER_TYPE, ONE_MASK, RECURRENT
from lade.model.supports import REFUSED as REFUSED_BY_NAME

ROOT = Path(__file__).parent.parent
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md"])
HOWTO = sorted((ROOT / "docs" / "howto").glob("*.md"))
MODELS = ROOT / "docs" / "models.md"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^    .*\n?)+", re.MULTILINE)
RETIRED = {"scripts/measure.py", "scripts/measure_batches.py", "scripts/step_cost.py"}
"""Of an older commit, which text may name; commands with them say which commit has them."""
PAST = re.compile(r"# .*\bat [0-9a-f]{7}\b")
ATTENTION = {"SDPA": "sdpa", "eager": "eager"}


def module_of(path: Path):
    """A file that is in no package, as a module."""
    name = f"_for_test_docs_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_of(text: str) -> str:
    """All that stands in code blocks."""
    fenced = [block.split("\n", 1)[1].rsplit("\n", 1)[0] for block in FENCE.findall(text)]
    indented = [block.replace("\n    ", "\n").removeprefix("    ") for block in INDENTED.findall(FENCE.sub("", text))]
    return "\n".join(fenced + indented)


def commands(text: str, *, past: bool = False) -> list[list[str]]:
    """Command lines in code blocks, as words; a line that ends with a backslash goes on.

    Args:
        text: of a page.
        past: those of an older commit, which a comment names, in place of today's.
    """
    lines = code_of(text).replace("\\\n", " ").split("\n")
    return [
        shlex.split(line.strip().removeprefix("$ "), comments=True)
        for line in lines
        if re.match(r"\s*(\$ )?(lade|make|python \S+\.py|python -m lade\.\S+) ", line + " ")
        and bool(PAST.search(line)) == past
    ]


def anchors(path: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# Links


def broken_links(path: Path, root: Path = ROOT) -> list[str]:
    broken = []
    for match in LINK.finditer(FENCE.sub("", path.read_text(encoding="utf-8"))):
        link = match[1] or match[2]
        if re.match(r"https?:|mailto:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        there = target.exists() and target.is_relative_to(root)
        if not there or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def test_all_pages_are_in_the_navigation_which_can_be_reached_from_the_readme():
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        links = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8"))
        targets = {(page.parent / link).resolve() for link in links if not link.startswith("http")}
        ahead += [target for target in targets - reached if target.is_file()]
    assert ROOT / "docs" / "index.md" in reached  # which has all others in its navigation
    configuration = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^\s+- (?:[\w ]+: )?([\w/-]+\.md)$", configuration, re.MULTILINE)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(pages)


# Commands


def misspelled(words: list[str]) -> str:
    """What is wrong with a command line; empty if nothing is."""
    match words:
        case ["lade", *rest]:
            return misspelled_lade(rest)
        case ["make", target, *_]:
            there = re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            return "" if there else f"no target {target}"
        case ["python", "-m", module, *_]:
            return "" if importlib.util.find_spec(module) else f"no module {module}"
        case ["python", script, *_]:
            return "" if (ROOT / script).is_file() else f"no {script}"
    return f"what is {words}?"


def misspelled_lade(words: list[str]) -> str:
    command = typer.main.get_command(app)
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    options = [word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)]
    return ", ".join(f"no option {name}" for name in options if name not in known | {"--help", "-h"})


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_files_and_commands_of_a_page_are_there(path):
    """But for commands that a comment says are of an older commit: those are no more."""
    text = path.read_text(encoding="utf-8")
    assert broken_links(path) == []
    named = re.findall(r"`((?:lade|tests|scripts|docs|lab)/[\w/.-]+)`", text)
    assert [name for name in named if name not in RETIRED and not (ROOT / name).exists()] == []
    wrong = {shlex.join(words): misspelled(words) for words in commands(text)}
    assert {line: problem for line, problem in wrong.items() if problem} == {}
    assert [shlex.join(words) for words in commands(text, past=True) if not misspelled(words)] == []


def test_broken_links_wrong_commands_and_figures_would_be_noticed(tmp_path):
    fenced = "```console\n$ lade generate --promt x\n$ lade frobnicate\n```\n"
    text = f"{fenced}\n    python scripts/none.py \\\n        --x\n    make none\n"
    found = [misspelled(words) for words in commands(text)]
    assert found == ["no option --promt", "no command frobnicate", "no scripts/none.py", "no target none"]
    assert misspelled(["lade", "doctor", "--model", "X", "--cached", "64"]) == ""
    older = "    python scripts/measure.py --x 1 \\\n        --y 2   # (a), at 11782b5\n"
    assert commands(older) == [] and commands(older, past=True)[0][:2] == ["python", "scripts/measure.py"]
    page = tmp_path / "page.md"
    page.write_text('# One two\n[a](#one-two) [b](#three) [c](none.md) <img src="none.svg"> [d](https://x.y)\n')
    assert broken_links(page, tmp_path) == ["#three", "none.md", "none.svg"]
    beside = "```\n3 ms\n```\n<!-- x -->\n2 %\n<!-- end -->\n| 2 ms |\n"
    found = figures(f"which alone bring 1.24\n{beside}takes 0.1 to 0.7 ms; 1.5 times; 3 M; every 15 s")
    assert found == ["bring 1.24", "0.7 ms", "1.5 times"]


@pytest.mark.parametrize("method", ["--window", "--budget"])
def test_the_runs_shown_step_by_step_are_those_of_the_script(method, capsys, monkeypatch):
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    (shown,) = re.findall(rf"^```console\n\$ python scripts/trace.py ({method}[^\n]*)\n(.*?)\n```$", text, re.M | re.S)
    typed(monkeypatch, "trace.py", *shown[0].split())
    module_of(ROOT / "scripts" / "trace.py").main()
    assert capsys.readouterr().out.rstrip() == shown[1], "the method has changed: run make traces"


# The README


def test_the_readme_can_be_read_in_a_few_minutes_and_counts_models_as_the_list_does():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= 700
    text, images = re.findall(r"^\*\*Served, (\d+) of (\d+)\*\*", MODELS.read_text(encoding="utf-8"), re.MULTILINE)
    assert f"{text[0]} of {text[1]} text classes and {images[0]} of {images[1]} image classes" in readme


# Figures


def figures(text: str) -> list[str]:
    """Measured figures in prose: beside code, tables, and what scripts write between comments."""
    blocks = (r"^```.*?^```", r"^<!-- .*?^<!-- end -->")
    for part in (*blocks, r"^\|[^\n]*$", r"`[^`]*`", r"\]\([^)]*\)"):
        text = re.sub(part, "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"(?<![\w.])\d[\d.,]* ?(?:%|times\b|[mu]s\b|tokens/s|tokens differed)|\bbring \d[\d.]*", text)


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "docs" / "index.md", *HOWTO], ids=lambda path: path.name)
def test_no_measured_figure_is_typed_by_hand(path):
    assert figures(path.read_text(encoding="utf-8")) == [], "let a script write it, or link to where it was measured"


# Lists that the code has too


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading of models.md, without its head."""
    section = MODELS.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in table[2:]]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([\w-]+)`", cell))


def test_the_listed_checked_and_recurrent_models_are_those_of_the_code_and_its_tests():
    families = module_of(ROOT / "tests" / "parity" / "families.py")
    listed = {name: (attention, reach) for cell, attention, reach in rows("Listed") for name in names(cell)}
    assert listed.keys() == MASK_PER_LAYER_TYPE | ONE_MASK
    for name, (attention, reach) in listed.items():
        tested = [case for case in families.FAMILIES if case.model_type == name]
        backends = {each for case in tested for each in case.backends}
        assert {ATTENTION[each] for each in attention.split(", ")} == backends
        extras = [case.extra for case in tested]
        windows = {"sliding window"} if any(extra.get("sliding_window") for extra in extras) else set()
        chunks = {"chunks"} if any(extra.get("attention_chunk_size") for extra in extras) else set()
        picked = {"keys that an indexer picks"} if any("index_topk" in extra for extra in extras) else set()
        assert {reach} - {""} == windows | chunks | picked, name
    section = MODELS.read_text(encoding="utf-8").partition("\n## Checked\n")[2].partition("\n## ")[0]
    assert {case.model_type for case in families.UNLISTED} <= names(section)
    told = set().union(*(names(cell) for _, cell in rows("Recurrent and hybrid")))
    assert told == RECURRENT == {case.model_type for case in families.RECURRENT_FAMILIES}


def test_the_refused_models_are_those_of_the_tests(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "parity")
    refusals = module_of(ROOT / "tests" / "parity" / "test_refusals.py")
    told = {name: reason for cell, reason in rows("Refused") for name in names(cell)}
    assert told.keys() == refusals.REFUSED.keys() | refusals.OTHER_STATES.keys() | REFUSED_BY_NAME.keys()
    for name, reason in REFUSED_BY_NAME.items():
        assert reason.removeprefix("its ") in told[name], name


# The reference


def test_the_reference_has_every_public_name_once():
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    listed = re.findall(r"^::: (lade\.\w+)$", pages, re.MULTILINE)
    public = [f"lade.{name}" for name in lade.__all__ if name not in ("__version__", "bench")]
    assert sorted(listed) == sorted([*public, "lade.testing"])
    in_bench = re.findall(r"^::: lade\.bench\.(\w+)$", pages, re.MULTILINE)
    assert sorted(in_bench) == sorted({*lade.bench.__all__} - {"workloads"})


# Names in examples


def examples() -> str:
    """All code that documentation and docstrings show, without lines that import."""
    packages = [Path(lade.__file__).parent, ROOT / "lab" / "lade_lab"]
    sources = "\n".join(path.read_text(encoding="utf-8") for each in packages for path in each.rglob("*.py"))
    shown = re.findall(r"^ *(?:>>>|\.\.\.) (.*)$", sources, re.MULTILINE)
    pages = [code_of(path.read_text(encoding="utf-8")) for path in DOCS]
    lines = "\n".join([*shown, *pages]).splitlines()
    return "\n".join(line for line in lines if not re.match(r"\s*(>>> )?(from|import) |.*(python -m|serve run) ", line))


def is_public(name: str) -> bool:
    """Whether each module on the way makes the next part of a dotted name known after a plain `import lade`."""
    thing = lade
    for part in name.split(".")[1:]:
        if (inspect.ismodule(thing) and part not in thing.__all__) or not hasattr(thing, part):
            return False
        thing = getattr(thing, part)
    return True


def test_names_in_examples_are_there_after_import_lade_and_others_would_be_noticed():
    named = set(re.findall(r"(?<![\w./`\"'-])lade(?:\.[A-Za-z_]\w*)+", examples()))
    assert {"lade.bench.workloads.load", "lade.generate", "lade.Memory.load"} <= named
    assert sorted(name for name in named if not is_public(name)) == []
    assert not any(map(is_public, ["lade.bench.harness.arms", "lade.bench.none", "lade.Memory.none", "lade.decoding"]))


def test_the_example_of_the_benchmark_runs_in_a_fresh_interpreter():
    (example,) = re.findall(r">>> (workload = .*)$", lade.bench.run.__doc__, re.MULTILINE)
    code = f"import lade\n{example}\nprint(len(workload.items))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("5\n", "")
