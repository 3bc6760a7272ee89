"""What a benchmark tells at its end: where texts differ, the table, the files, and the exit code."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.text import Text

from lade.bench.harness.benchmark import RESULTS
from lade.bench.results import Mismatch, Results
from lade.cli.bench.job import Plan
from lade.cli.terminal import Terminal
from lade.errors import InputError
from lade.files import differences

EXIT_MISMATCH = 1
REPORT = "report.html"

_ALWAYS = (RESULTS, REPORT)


def complete_results(plan: Plan) -> Results | None:
    """The results in the folder if they are complete and of this plan; None if there is anything left to run.

    No model is needed for that, and no machine like the one that they are from.

    Raises:
        InputError: they are of another plan; the first difference is named.
    """
    path = plan.out / RESULTS
    if not (plan.files.resume and path.exists()):
        return None
    results = Results.load(path)
    if not results.complete:
        return None
    there = {
        "model": results.model.name,
        "methods": [method.name for method in results.methods],
        "settings": asdict(results.settings),
        "workloads": [asdict(workload) for workload in results.workloads],
    }
    here = {
        "model": plan.name,
        "methods": [method.name for method in plan.methods],
        "settings": asdict(plan.settings),
        "workloads": [asdict(workload.record) for workload in plan.workloads],
    }
    for name, theirs, ours in differences(there, here):
        raise InputError(
            f"{name} is {ours!r} here, but {theirs!r} in {str(path)!r}, which is complete: give what it was run with, "
            "or another --out"
        )
    return results


def report(results: Results, plan: Plan, tokenizer: Any, term: Terminal) -> None:
    """Print the results, and write the report, with figures if they are wanted.

    Args:
        results: complete or not.
        plan: says where to, and whether as JSON.
        tokenizer: to spell tokens with; None: they are named by their ids.
        term: where to report it.
    """
    for mismatch in results.mismatches:
        term.say(Text(described(mismatch, tokenizer), "yellow" if mismatch.near_tie else "bold red"))
    files = _draw(results, plan) if results.samples else []
    if plan.files.json:
        from lade.bench.analysis.summary import summarise

        found = [asdict(mismatch) for mismatch in results.mismatches]
        facts = {"model": asdict(results.model), "out": str(plan.out), "files": files, "mismatches": found}
        term.write_json({**facts, **summarise(results).as_dict()})
    elif results.samples:
        from lade.bench.report.table import print_table

        print_table(results, term.out)
    if files:
        figures = len(files) - len(_ALWAYS)
        more = f" and {figures} figures" if figures else ""
        term.say(f"{', '.join(_ALWAYS)}{more} are in {str(plan.out)!r}", "dim")


def exit_code(results: Results, *, allow_near_ties: bool) -> int:
    """1 where a text differs from the reference's; near ties count unless they are allowed."""
    counting = [each for each in results.mismatches if not (allow_near_ties and each.near_tie)]
    return EXIT_MISMATCH if counting else 0


def described(mismatch: Mismatch, tokenizer: Any) -> str:
    """One line: which answer, the first token that differs, both scores."""
    where = f"{mismatch.workload} {mismatch.prompt}"
    where += f" turn {mismatch.turn + 1}" if mismatch.turn else ""
    where += f" seed {mismatch.seed}" if mismatch.seed else ""
    where += f" repeat {mismatch.repeat + 1}" if mismatch.repeat else ""
    found = _token(mismatch.found, mismatch.found_score, tokenizer)
    expected = _token(mismatch.expected, mismatch.expected_score, tokenizer)
    apart = "" if mismatch.ulps is None else f", {mismatch.ulps:.1f} units in the last place apart"
    verdict = "a near tie" if mismatch.near_tie else "NOT explained by rounding"
    return (
        f"differs: {where}: at new token {mismatch.place} {mismatch.method} has {found}, {mismatch.reference} has "
        f"{expected}{apart}: {verdict}"
    )


def _token(token: int | None, score: float | None, tokenizer: Any) -> str:
    if token is None:
        return "the end of the text"
    piece = "" if tokenizer is None else f"{tokenizer.decode([token])!r} "
    return f"{piece}(id {token}{'' if score is None else f', score {score:.6g}'})"


def _draw(results: Results, plan: Plan) -> list[str]:
    """Names of the files written."""
    from lade.bench.report.figures import save_figures
    from lade.bench.report.page import write_report

    write_report(results, plan.out / REPORT)
    figures = save_figures(results, plan.out) if plan.files.figures else []
    return [*_ALWAYS, *(str(file.relative_to(plan.out)) for file in figures)]
