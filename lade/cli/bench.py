"""`lade bench`: run ways to decode side by side, compare their outputs, then their speeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lade.cli import compare, options, scaling
from lade.cli.terminal import EXIT_INTERRUPTED, Terminal, terminal
from lade.errors import InputError

if TYPE_CHECKING:
    from lade.bench.results import Method, Settings
    from lade.bench.workloads import Workload

EXAMPLE = "Example:  [bold]lade bench --model gpt2 --workload HumanEval.jsonl.gz --limit 20[/bold]"
FOLDER = Path("bench-results")

app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich", subcommand_metavar="[COMMAND]")


@dataclass(frozen=True)
class Plan:
    """What is asked for, checked as far as that can be done without a model.

    Attributes:
        loading: the model, and how to load it.
        draft: as on the command line.
        methods, workloads, settings: what to run.
        out: folder for everything.
        resume: go on with what is in it.
        pack, inflate, threads: what becomes of it.
        json: whether the end is told as JSON.
        allow_near_ties: whether they leave the exit code 0.
    """

    loading: options.Loading
    draft: str | None
    methods: list[Method]
    workloads: list[Workload]
    settings: Settings
    out: Path
    resume: bool
    pack: bool | None
    inflate: float | None
    threads: int | None
    json: bool
    allow_near_ties: bool

    @property
    def name(self) -> str:
        """Of the model, for the record."""
        return self.loading.label


@app.callback(epilog=EXAMPLE)
@options.grouped
def bench(
    context: typer.Context,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            "-w",
            metavar="FILE",
            help="Prompts: a file of Spec-Bench, MT-Bench, HumanEval, MBPP, GSM8K or ClassEval, or JSON lines with the "
            "key prompt. May be given several times. Not given: builtin, functions of Python's library to continue.",
        ),
    ] = None,
    *,
    format: Annotated[
        str | None, typer.Option(metavar="NAME", help="Format of the files. Not given: recognised by their keys.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="P", help="Only the first P prompts of each workload.")] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            metavar="M,M,...",
            help="Of hf, hf-prompt-lookup, hf-assisted, plain, jacobi[=K], lookahead[=W,N,G], adaptive[=B] and "
            "adaptive-warm[=B]. Not given: all but hf-assisted.",
        ),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="FOLDER_OR_HUB_ID", help="The model that hf-assisted drafts with.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for results. Not given: bench-results/MODEL.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where it was left; a run that is complete is only reported anew.")
    ] = False,
    max_new_tokens: options.MaxNewTokens = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Write on behind the end of a text.")] = False,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="Draw tokens at this temperature. Not given: decode greedily.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Draw only among the K likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Draw only among the likeliest that add up to P.")
    ] = None,
    seeds: Annotated[
        str, typer.Option(metavar="S,S,...", help="Of torch's generator; one answer to each prompt for each.")
    ] = "0",
    repeats: Annotated[int, typer.Option(metavar="R", help="How often each answer is timed.")] = 1,
    inflate: Annotated[
        float | None,
        typer.Option(
            metavar="PARAMS", help="Grow the model to so many parameters, such as 500e6: same text, its cost."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="CPU threads. Not given: as torch has it (the embedded model: 1).")
    ] = None,
    loading: options.Loading,
    pack: Annotated[
        bool | None,
        typer.Option(
            "--pack/--no-pack",
            help="Prepacked weights for this library's methods; hf and its like run on a second, plain copy. "
            "Not given: on the CPU where it pays.",
        ),
    ] = None,
    allow_near_ties: Annotated[
        bool, typer.Option("--allow-near-ties", help="Exit code 0 though texts differ, if rounding explains all of it.")
    ] = False,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Run ways to decode side by side on the same prompts; outputs are compared first, then speeds are reported.

    Without options: the embedded model on built-in prompts, offline, in a minute or two.

    DIR gets results.json, report.html, figures, and a journal from which --resume goes on after Ctrl-C.

    Exit code 1: a method's output differs from the first's. 2: bad input. 130: interrupted.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    with terminal(output) as term:
        options.check_max_new_tokens(max_new_tokens)
        options.check_ranges({"temperature": temperature, "top_k": top_k, "top_p": top_p})
        out = out or FOLDER / (loading.name.split("/")[-1] + ("" if inflate is None else f"-{inflate / 1e6:.0f}M"))
        _check(out, resume, threads)
        from lade.bench.results import Settings

        settings = Settings(
            max_new_tokens=max_new_tokens,
            ignore_eos=ignore_eos,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seeds=_seeds(seeds),
            repeats=repeats,
        )
        run(
            Plan(
                loading=loading,
                draft=draft,
                methods=_methods(methods, settings, draft),
                workloads=_workloads(workload, format, limit),
                settings=settings,
                out=out,
                resume=resume,
                pack=pack,
                inflate=inflate,
                threads=threads,
                json=json,
                allow_near_ties=allow_near_ties,
            ),
            term,
        )


app.command("compare", epilog=compare.EXAMPLE)(compare.compare)
app.command("scaling", epilog=scaling.EXAMPLE)(scaling.scaling)


def run(plan: Plan, term: Terminal) -> None:
    """Do it, and tell what came of it.

    Raises:
        typer.Exit: outputs differ, or Ctrl-C was pressed.
    """
    from lade.bench.checks import check_settings
    from lade.cli.bench_models import load_models
    from lade.cli.bench_report import complete_results, exit_code, report
    from lade.cli.bench_run import carry_out

    check_settings(plan.settings)
    results = complete_results(plan)
    if results is not None:
        term.say(f"{str(plan.out)!r} is complete: reported anew", "dim")
        report(results, plan, None, term)
    else:
        models, tokenizer = load_models(plan, term)
        results = carry_out(plan, models, tokenizer, term)
        report(results, plan, tokenizer, term)
    if not results.complete:
        raise typer.Exit(EXIT_INTERRUPTED)
    code = exit_code(results, allow_near_ties=plan.allow_near_ties)
    if code:
        raise typer.Exit(code)


def _refuse_options(context: typer.Context) -> None:
    """What stands before the name of another command would be lost."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        with terminal():
            name, command = given[0].replace("_", "-"), context.invoked_subcommand
            raise InputError(f"--{name} stands before {command}: put it behind, if {command} has it")


def _methods(given: list[str] | None, settings: Settings, draft: str | None) -> list[Method]:
    from lade.bench.methods import DEFAULT, parse_all

    texts = given or [*DEFAULT, *(["hf-assisted"] if draft is not None else [])]
    return parse_all(texts, sampling=settings.temperature is not None, draft=draft is not None)


def _workloads(given: list[str] | None, format: str | None, limit: int | None) -> list[Workload]:
    from lade.bench import workloads

    return [workloads.load(source, format, limit) for source in given or [workloads.BUILTIN]]


def _seeds(text: str) -> list[int]:
    return options.whole_numbers("seeds", text, 0, "0,1,2")


def _check(out: Path, resume: bool, threads: int | None) -> None:
    """Find out before the work begins what would end it."""
    options.check_threads(threads)
    from lade.bench.benchmark import check_folder

    check_folder(out, resume=resume)
