"""Carries a benchmark out: what it is going to do, progress with the time left, and what Ctrl-C leaves."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from lade.bench.harness.arms import Models
from lade.bench.harness.benchmark import prepare
from lade.bench.harness.experiment import Experiment
from lade.bench.results import Results
from lade.cli.bench.job import Plan
from lade.cli.options.model import command_line
from lade.cli.progress import Progress
from lade.cli.terminal import Terminal

LINE_EVERY_S = 30.0
"""Where there is no terminal to draw a bar on."""


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
