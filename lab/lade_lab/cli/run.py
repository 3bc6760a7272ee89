"""Execution of a benchmark: progress, table, files, exit code."""

from __future__ import annotations

from dataclasses import asdict
from time import perf_counter
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from lade.cli.terminal import Progress, Terminal, count
from lade.errors import InputError
from lade_lab.cli.job import Plan, command_line
from lade_lab.harness.arms import Models
from lade_lab.harness.benchmark import RESULTS, prepare
from lade_lab.harness.experiment import Experiment
from lade_lab.results import Mismatch, Results
from lade_lab.terms import differences

LINE_EVERY_S = 30.0
"""Seconds between progress lines where output is no terminal."""


def carry_out(plan: Plan, models: Models, tokenizer: Any, term: Terminal) -> Results:
    """Run the benchmark to its end, or until Ctrl-C; results.json has all that is done either way."""
    experiment = prepare(
        models,
        tokenizer,
        plan.workloads,
        plan.methods,
        plan.settings,
        folder=plan.out,
        resume=plan.files.resume,
        command=command_line(),
    )
    _announce(experiment, term)
    try:
        experiment.warm_up()
        if experiment.done < len(experiment.jobs):
            term.say(f"about {duration(experiment.seconds_left)}", "dim")
        _watch(experiment, term)
    except KeyboardInterrupt:
        kept = f"{experiment.done} of {len(experiment.jobs)} prompts are in {str(plan.out)!r}"
        term.say(f"interrupted: {kept}; the same command with --resume continues", "yellow")
    return experiment.results


def duration(seconds: float) -> str:
    """Roughly, such as `40 s`, `3 min` or `2 h 10 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _announce(experiment: Experiment, term: Terminal) -> None:
    results = experiment.results
    model, settings = results.model, results.settings
    machine = f"{results.environment.device}, {_counted(results.environment.threads, 'thread')}"
    term.say(f"{model.name}, {model.parameters / 1e6:.1f}M {model.dtype} parameters on {machine}")
    prompts = ", ".join(f"{_counted(each.prompts, 'prompt')} of {each.name}" for each in results.workloads)
    how = "greedily" if settings.temperature is None else f"at temperature {settings.temperature:g}"
    times = len(settings.seeds) * settings.repeats
    again = f", {times} times each" if times > 1 else ""
    end = ", past the end of the text" if settings.ignore_eos else ""
    term.say(f"{prompts}{again}, at most {settings.max_new_tokens} new tokens, {how}{end}")
    term.say(f"methods: {', '.join(method.name for method in results.methods)}")
    if experiment.done:
        term.say(f"continuing after {experiment.done} of {len(experiment.jobs)} prompts", "dim")
    if experiment.outgrowing:
        outgrowing = _counted(experiment.outgrowing, "prompt")
        term.say(f"warning: {outgrowing} may outgrow the model's context with the answers", "yellow")


def _watch(experiment: Experiment, term: Terminal) -> None:
    """Show how far it is: with a bar on a terminal, with a line now and then elsewhere."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("prompts · time left"), TimeRemainingColumn())
    bar, begun, start, reported_at = term.animated, experiment.done, perf_counter(), perf_counter()
    total = len(experiment.jobs)
    with Progress(*columns, console=term.err, transient=True, disable=not bar) as progress:
        task = progress.add_task("prompts", total=total, completed=begun)
        for done in experiment:
            progress.update(task, completed=done)
            now = perf_counter()
            if not bar and now - reported_at > LINE_EVERY_S and done < total:
                left = (now - start) / (done - begun) * (total - done)
                term.say(f"{done} of {total} prompts, about {duration(left)} left", "dim")
                reported_at = now


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


EXIT_MISMATCH = 1


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
        "model": plan.model_name(invariant=bool(plan.weights.invariant)),
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
    """Print the results, and draw figures; without a tokenizer tokens are named by their ids."""
    for mismatch in results.mismatches:
        term.say(Text(described(mismatch, tokenizer), "yellow" if mismatch.near_tie else "bold red"))
    files = _draw(results, plan) if results.samples else []
    if plan.files.json:
        from lade_lab.report.prose import verdict
        from lade_lab.summary import summarise

        found = [asdict(mismatch) for mismatch in results.mismatches]
        facts = {"model": asdict(results.model), "out": str(plan.out), "files": files, "mismatches": found}
        summary = summarise(results)
        said = verdict(results, summary) if results.samples else None
        term.write_json({**facts, "verdict": said, **summary.as_dict()})
    elif results.samples:
        from lade_lab.report.table import print_table

        print_table(results, term.out)
    if files:
        more = f" and {count(len(files) - 1, 'picture')} are" if len(files) > 1 else " is"
        term.say(f"{RESULTS}{more} in {str(plan.out)!r}", "dim")
    if results.samples and not plan.files.json:
        from lade_lab.report.prose import verdict
        from lade_lab.summary import summarise

        term.out.print(Text(verdict(results, summarise(results)), "bold"))


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
    from lade_lab.report.figures import can_draw, save_figures

    wanted = None if plan.files.figures else {"speedup"} if can_draw() else set[str]()
    figures = [] if wanted == set() else save_figures(results, plan.out, wanted)
    return [RESULTS, *(str(file.relative_to(plan.out)) for file in figures)]
