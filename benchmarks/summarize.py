"""Writes into the pages of this folder what the results say, so that no figure in them is typed by hand.

    python benchmarks/summarize.py             write
    python benchmarks/summarize.py --draw      draw the pictures again, too
    python benchmarks/summarize.py --check     exit code 1 if a page says anything else than the results

A page has places like these, and what lies between the two lines is made here:

    <!-- results: results.json -->       tables and figures of a benchmark
    <!-- scaling: scaling.json -->       the same of the scaling law
    <!-- text: parity.txt -->            a file as it is
    <!-- overview -->                    all benchmarks with their headline figures
    <!-- benchmarks: ../benchmarks --> the overview without links, for docs/measurements.md
    <!-- end -->
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from catalogue import BENCHMARKS, FOLDER, Benchmark

from lade_lab.report.figures import MEANINGS, save_figures
from lade_lab.report.prose import LOSS, MISSING, count, is_loss, number, rate
from lade_lab.report.table import as_markdown
from lade_lab.results import Results
from lade_lab.scaling_law import Scaling
from lade_lab.scaling_law import save_figures as save_scaling
from lade_lab.summary import Row, Summary, summarise

NOT_YET = "Not run yet."
FIGURES = MEANINGS | {"scaling": "Tokens per step against tokens fed and against guesses, with the fitted laws"}
SHOWN = ("torch", "transformers", "cuda")
HEADLINES = ("hf-prompt-lookup", "plain", "lookahead", "adaptive", "adaptive-warm")
GPU = [
    Benchmark(f"gpu/results/{name}", f"a chat model at the cost of 7B parameters, bfloat16, {more}", "", 0)
    for name, more in (("text", "on a GPU"), ("sampled", "at temperature 0.7, on a GPU"))
]
_PLACE = re.compile(r"(<!-- (overview|(?:results|scaling|text|benchmarks): \S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages(folder: Path = FOLDER) -> list[Path]:
    """Return all pages of a folder of benchmarks, and those beside the folder that have a place for its figures."""
    beside = folder.parent / "docs" / "measurements.md"
    return sorted(folder.rglob("README.md")) + [beside] * beside.exists()


def made(page: Path) -> str:
    """A page with what lies between its marks made again."""
    makers: dict[str, Callable[[Path, Path], str]] = {
        "results": _results,
        "scaling": _scaling,
        "text": _text,
        "benchmarks": _without_links,
    }

    def fill(place: re.Match[str]) -> str:
        kind, _, file = place[2].partition(": ")
        if kind == "overview":
            body = _overview(page.parent)
        else:
            body = makers[kind](page.parent, Path(file)) if (page.parent / file).exists() else NOT_YET
        return f"{place[1]}\n{body.strip()}\n\n{place[3]}"

    return _PLACE.sub(fill, page.read_text(encoding="utf-8"))


def write_pages(folder: Path = FOLDER) -> list[Path]:
    """Write all pages; those that have changed."""
    changed = [page for page in pages(folder) if page.read_text(encoding="utf-8") != made(page)]
    for page in changed:
        page.write_text(made(page), encoding="utf-8")
    return changed


def draw(folder: Path = FOLDER) -> None:
    """Draw the pictures of all benchmarks again; no model is run."""
    for benchmark in [*BENCHMARKS, *GPU]:
        file = folder / benchmark.results
        if not file.exists():
            continue
        if benchmark.command == "bench scaling":
            save_scaling(Scaling.load(file), file.parent)
        else:
            save_figures(Results.load(file), file.parent)


def _text(folder: Path, file: Path) -> str:
    return f"```text\n{(folder / file).read_text(encoding='utf-8').strip()}\n```"


def _results(folder: Path, file: Path) -> str:
    results = Results.load(folder / file)
    return "\n\n".join([as_markdown(results).strip(), _command(results), *_pictures(folder, file.parent)])


def _scaling(folder: Path, file: Path) -> str:
    found = Scaling.load(folder / file)
    parts = [
        _command(found),
        f"Tokens per step, and tokens fed per step in brackets, for W = G; {_texts_of_scaling(found)}",
        _grid(found),
        "The line S = a + b · log2 T through the sizes of each N, and the formula S = (f - 1 + E) / f with "
        "E = N - Σ (1 - alpha^i)^G over 0 < i < N, fitted to each N and to all of them:",
        _fits(found),
    ]
    return "\n\n".join([*parts, *_pictures(folder, file.parent)])


def _command(found: Results | Scaling) -> str:
    state = "" if found.complete else ", interrupted"
    return f"Run on {found.created[:10]}{state}:\n\n```text\n{shlex.join(found.command)}\n```"


def _texts_of_scaling(found: Scaling) -> str:
    answers = len(found.references) * len(found.points)
    if found.wrong:
        return f"{len(found.wrong)} of {count(answers, 'answer')} DIFFER from plain decoding's."
    return f"all {count(answers, 'answer')} equal plain decoding's."


def _grid(found: Scaling) -> str:
    known = {(point.window, point.ngram): point for point in found.points}
    rows = []
    for window in sorted({point.window for point in found.points}):
        own = [known.get((window, ngram)) for ngram in found.ngrams]
        cells = [MISSING if each is None else f"{each.tokens_per_step:.3f} ({each.fed_per_step:.0f})" for each in own]
        rows.append([str(window), *cells])
    return _table(["W", *(f"N = {ngram}" for ngram in found.ngrams)], rows)


def _fits(found: Scaling) -> str:
    rows = []
    for ngram in [*found.ngrams, None]:
        line, formula = None if ngram is None else found.line(ngram), found.expectation(ngram)
        of_line = [line.intercept, line.slope, line.r_squared] if line else [None] * 3
        of_formula = [formula.alpha, formula.f, formula.rms] if formula else [None] * 3
        cells = [number(value, 3) for value in [*of_line, *of_formula]]
        rows.append(["all" if ngram is None else str(ngram), *cells])
    return _table(["N", "a", "b", "R²", "alpha", "f", "rms error"], rows)


def _pictures(folder: Path, inside: Path) -> list[str]:
    """Return links to the pictures that exist."""
    files = [(inside / f"{name}.svg", meaning) for name, meaning in FIGURES.items()]
    return [f"![{meaning}]({file})" for file, meaning in files if (folder / file).exists()]


def _without_links(above: Path, folder: Path) -> str:
    """The overview, named by folder: the documentation's site does not hold the pages of benchmarks."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"`\1`", _overview(above / folder))


def _overview(folder: Path) -> str:
    rows, machines = [], defaultdict[str, list[str]](list)
    for benchmark in [*BENCHMARKS, *GPU]:
        page = next(path for path in (Path(benchmark.name), *Path(benchmark.name).parents) if _has_page(folder, path))
        file = folder / benchmark.results
        cells = [f"[{benchmark.name}]({page}/README.md)", benchmark.question]
        if benchmark.command == "bench scaling":
            rows.append([*cells, *_slopes(file), *[MISSING] * (1 + len(HEADLINES))])
        elif file.exists():
            results = Results.load(file)
            machines[_machine(results)].append(benchmark.name)
            rows.append([*cells, *_headlines(results)])
        else:
            rows.append([*cells, "not run yet", *[""] * (1 + len(HEADLINES))])
    table = _table(["benchmark", "question", "texts", "hf, tok/s", *HEADLINES], rows, left=3)
    if len(machines) == 1:
        return f"{table}\n\nMeasured on {next(iter(machines))}."
    return "\n\n".join([table, *(f"Measured on {machine}: {', '.join(names)}." for machine, names in machines.items())])


def _machine(results: Results) -> str:
    """In short; the benchmark's own page says all."""
    place = results.environment
    return ", ".join([place.device, *(f"{name} {place.versions[name]}" for name in SHOWN if name in place.versions)])


def _has_page(folder: Path, path: Path) -> bool:
    return (folder / path / "README.md").exists()


def _headlines(results: Results) -> list[str]:
    summary = summarise(results)
    rows = {row.method: row for row in summary.overall.rows}
    reference = rows[summary.reference]
    pace = rate(reference.decode_rate.median if reference.decode_rate else None)
    return [_texts(summary), pace, *(_headline(rows.get(name)) for name in HEADLINES)]


def _headline(row: Row | None) -> str:
    """`2.07 (S 1.41)`: speed-up over `hf`, and tokens per step where they are not 1."""
    if row is None or row.speedup is None:
        return MISSING
    median = row.speedup.each.median
    steps = row.tokens_per_step
    made_of = f" (S {steps:.2f})" if steps is not None and steps > 1.0 else ""
    return f"{LOSS} {median:.2f}{made_of}" if is_loss(median) else f"{median:.2f}{made_of}"


def _texts(summary: Summary) -> str:
    compared = [row for row in summary.overall.rows if row.compared and row.method != summary.reference]
    answers = sum(row.samples for row in compared)
    faults, ties = sum(row.mismatches for row in compared), sum(row.near_ties for row in compared)
    state = "" if summary.complete else "incomplete; "
    if faults:
        return f"{state}{faults} of {answers} DIFFER"
    return f"{state}{ties} of {answers} diverge at near ties" if ties else f"{state}equal"


def _slopes(file: Path) -> list[str]:
    if not file.exists():
        return ["not run yet"]
    found = Scaling.load(file)
    slopes = [line.slope for ngram in found.ngrams if (line := found.line(ngram)) is not None]
    if not slopes:
        return [_texts_of_scaling(found)]
    return [f"S grows by {min(slopes):.2f} to {max(slopes):.2f} with each doubling of the tokens fed"]


def _table(head: list[str], rows: list[list[str]], left: int = 0) -> str:
    """The first `left` columns hold text, the others numbers."""
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(arguments: list[str] | None = None, folder: Path = FOLDER) -> int:
    """Do what the command line asks for; the exit code."""
    parser = argparse.ArgumentParser(prog="summarize.py", description="Write what the results say into the pages.")
    parser.add_argument("--check", action="store_true", help="only say which pages are not what the results say")
    parser.add_argument("--draw", action="store_true", help="draw the pictures again, too")
    given = parser.parse_args(arguments)
    if given.draw:
        draw(folder)
    if not given.check:
        for page in write_pages(folder):
            print(f"written: {os.path.relpath(page, folder)}")
        return 0
    stale = [page for page in pages(folder) if page.read_text(encoding="utf-8") != made(page)]
    for page in stale:
        print(f"not what the results say: {os.path.relpath(page, folder)}; run python benchmarks/summarize.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
