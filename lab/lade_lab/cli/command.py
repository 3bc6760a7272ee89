"""`lade bench`."""

from __future__ import annotations

import typer

from lade.cli.options import ShellCommand, ShellGroup
from lade.cli.options import decoding as options
from lade.cli.terminal import EXIT_INTERRUPTED, Terminal, terminal
from lade.errors import InputError
from lade_lab.cli import compare, scaling
from lade_lab.cli.job import Answers, Files, Plan, Runs, Weights
from lade_lab.cli.throughput import LoadOptions, measure

EXAMPLE = "Example:  [bold]lade bench --model gpt2 --prompts HumanEval.jsonl.gz --limit 20[/bold]"

app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich", subcommand_metavar="[COMMAND]", cls=ShellGroup)


@app.callback(epilog=EXAMPLE)
@options.grouped
def bench(
    context: typer.Context,
    runs: Runs,
    *,
    answers: Answers,
    many: LoadOptions,
    files: Files,
    loading: options.Loading,
    weights: Weights,
    output: options.Output,
) -> None:
    """Compare decoding methods on the same prompts: outputs first, then speeds.

    Without options: the embedded model on built-in prompts, offline, in a minute or two.

    Writes results.json and pictures to --out; --resume continues from them after Ctrl-C.

    Exit code 1: a method's output differs from the first's. 2: bad input. 130: interrupted.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    with terminal(output) as term:
        if many.given:
            rows = many.rows(runs, files, sampling=bool(answers.temperature))
            measure(Plan.of(loading, runs, answers, files, weights), rows, many.arrivals, term)
        else:
            run(Plan.of(loading, runs, answers, files, weights), term)


app.command("compare", epilog=compare.EXAMPLE, cls=ShellCommand)(compare.compare)
app.command("scaling", epilog=scaling.EXAMPLE, cls=ShellCommand)(scaling.scaling)


def run(plan: Plan, term: Terminal) -> None:
    """Do it, and tell what came of it.

    Raises:
        typer.Exit: outputs differ, or Ctrl-C was pressed.
    """
    from lade_lab.cli.models import load_models
    from lade_lab.cli.run import carry_out, complete_results, exit_code, report

    results = complete_results(plan)
    if results is not None:
        term.say(f"{str(plan.out)!r} is complete: reported again", "dim")
        report(results, plan, None, term)
    else:
        models, tokenizer = load_models(plan, term)
        results = carry_out(plan, models, tokenizer, term)
        report(results, plan, tokenizer, term)
    if not results.complete:
        raise typer.Exit(EXIT_INTERRUPTED)
    code = exit_code(results, allow_near_ties=plan.files.allow_near_ties)
    if code:
        raise typer.Exit(code)


def _refuse_options(context: typer.Context) -> None:
    """Refuse options before the name of a subcommand, which would be lost."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        with terminal():
            name, command = given[0].replace("_", "-"), context.invoked_subcommand
            raise InputError(f"--{name} stands before {command}: put it after, if {command} has it")


def register(shell: typer.Typer) -> None:
    """Add `lade bench` to the shell; an entry point of the group `lade.commands`."""
    shell.add_typer(app, name="bench")
