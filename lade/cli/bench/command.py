"""`lade bench`: run ways to decode side by side, compare their outputs, then their speeds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lade.cli.bench import compare, plan, scaling
from lade.cli.bench.job import Plan
from lade.cli.options import decoding as options
from lade.cli.terminal import EXIT_INTERRUPTED, Terminal, terminal
from lade.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from lade.bench.results import Method, Settings
    from lade.bench.workloads import Workload

EXAMPLE = "Example:  [bold]lade bench --model gpt2 --workload HumanEval.jsonl.gz --limit 20[/bold]"
FOLDER = Path("bench-results")

_WHAT = "What to run"

app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich", subcommand_metavar="[COMMAND]")


def _what(*names: str, metavar: str | None = None, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=_WHAT)


def _answers(*names: str, metavar: str | None = None, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Answers")


def _results(*names: str, metavar: str | None = None, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Results")


def _model(*names: str, metavar: str | None = None, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Model")


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
            rich_help_panel=_WHAT,
            help="Prompts: Spec-Bench, MT-Bench, HumanEval, MBPP, GSM8K, ClassEval, or JSON lines with the key prompt. "
            "May be given again. Default: builtin, Python to continue.",
        ),
    ] = None,
    *,
    format: Annotated[
        str | None, _what("--format", metavar="NAME", help="Format of the files. Default: seen by their keys.")
    ] = None,
    limit: Annotated[int | None, _what("--limit", metavar="P", help="Only the first P prompts of each file.")] = None,
    methods: Annotated[
        list[str] | None,
        _what(
            "--methods",
            metavar="M,M,...",
            help="Of hf, hf-prompt-lookup, hf-assisted, plain, jacobi[=K], lookahead[=W,N,G], adaptive[=B], "
            "adaptive-warm[=B]. Default: all but hf-assisted.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        _what("--draft", metavar="MODEL", help="Folder or hub id of the model that hf-assisted drafts with."),
    ] = None,
    max_new_tokens: Annotated[
        int, _answers("--max-new-tokens", "-n", metavar="N", help="Tokens to generate at most.")
    ] = 128,
    ignore_eos: Annotated[bool, _answers("--ignore-eos", help="Write on after the end of a text.")] = False,
    temperature: Annotated[
        float | None, _answers("--temperature", metavar="T", help="Draw tokens at this temperature. Default: greedy.")
    ] = None,
    top_k: Annotated[int | None, _answers("--top-k", metavar="K", help="Draw only among the K likeliest.")] = None,
    top_p: Annotated[
        float | None, _answers("--top-p", metavar="P", help="Draw only among the likeliest that add up to P.")
    ] = None,
    seeds: Annotated[
        str, _answers("--seeds", metavar="S,S,...", help="One answer to each prompt for each seed.")
    ] = "0",
    repeats: Annotated[int, _answers("--repeats", metavar="R", help="How often each answer is timed.")] = 1,
    out: Annotated[
        Path | None, _results("--out", metavar="DIR", help="Folder for them. Default: bench-results/MODEL.")
    ] = None,
    resume: Annotated[
        bool, _results("--resume", help="Go on where it was left; a run that is complete is only reported again.")
    ] = False,
    figures: Annotated[bool, _results("--figures", help="Draw the pictures into files too, SVG and PNG.")] = False,
    allow_near_ties: Annotated[
        bool, _results("--allow-near-ties", help="Exit code 0 though texts differ, if rounding explains it.")
    ] = False,
    inflate: Annotated[
        float | None,
        _model(
            "--inflate", metavar="PARAMS", help="Grow it to so many parameters, such as 500e6: same text, its cost."
        ),
    ] = None,
    threads: Annotated[
        int | None, _model("--threads", metavar="N", help="CPU threads. Default: torch's (the embedded model: 1).")
    ] = None,
    loading: options.Loading,
    pack: Annotated[
        bool | None,
        _model(
            "--pack/--no-pack",
            help="Prepacked weights for this library's methods; hf runs on a plain copy. Default: on the CPU.",
        ),
    ] = None,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Run ways to decode side by side on the same prompts; outputs are compared first, then speeds are reported.

    Without options: the embedded model on built-in prompts, offline, in a minute or two.

    DIR gets results.json, from which --resume goes on after Ctrl-C, and report.html; figures with --figures.

    Exit code 1: a method's output differs from the first's. 2: bad input. 130: interrupted.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    with terminal(output) as term:
        options.check_max_new_tokens(max_new_tokens)
        options.check_ranges({"temperature": temperature, "top_k": top_k, "top_p": top_p})
        out = out or FOLDER / (loading.name.split("/")[-1] + ("" if inflate is None else f"-{inflate / 1e6:.0f}M"))
        _check(out, resume, threads, figures)
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
                figures=figures,
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
app.command("plan", epilog=plan.EXAMPLE)(plan.plan)


def run(plan: Plan, term: Terminal) -> None:
    """Do it, and tell what came of it.

    Raises:
        typer.Exit: outputs differ, or Ctrl-C was pressed.
    """
    from lade.bench.harness.checks import check_settings
    from lade.cli.bench.models import load_models
    from lade.cli.bench.report import complete_results, exit_code, report
    from lade.cli.bench.run import carry_out

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
            raise InputError(f"--{name} stands before {command}: put it after, if {command} has it")


def _methods(given: list[str] | None, settings: Settings, draft: str | None) -> list[Method]:
    from lade.bench.harness.methods import DEFAULT, parse_all

    texts = given or [*DEFAULT, *(["hf-assisted"] if draft is not None else [])]
    return parse_all(texts, sampling=settings.temperature is not None, draft=draft is not None)


def _workloads(given: list[str] | None, format: str | None, limit: int | None) -> list[Workload]:
    from lade.bench import workloads

    return [workloads.load(source, format, limit) for source in given or [workloads.BUILTIN]]


def _seeds(text: str) -> list[int]:
    return options.whole_numbers("seeds", text, 0, "0,1,2")


def _check(out: Path, resume: bool, threads: int | None, figures: bool) -> None:
    """Find out before the work begins what would end it."""
    if figures and find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "bench")
    options.check_threads(threads)
    from lade.bench.harness.benchmark import check_folder

    check_folder(out, resume=resume)
