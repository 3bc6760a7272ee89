"""`lade generate`: continue prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lade.cli import options
from lade.cli.batch import batch_of
from lade.cli.prompts import read_prompts
from lade.cli.terminal import EXIT_INTERRUPTED, Terminal, terminal
from lade.errors import ConfigError

if TYPE_CHECKING:
    from lade.cli.decoding import Generation, Lookahead
    from lade.cli.loading import Subject

EXAMPLE = 'Example:  [bold]lade generate --prompt "def mean(values):" --max-new-tokens 100[/bold]'
_LONGEST_ECHO = 2000


@options.grouped
def generate(
    source: Annotated[str | None, typer.Argument(metavar="[-]", help="-: read the prompt from standard input.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The text to continue.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="One prompt; if it ends in .jsonl, one a line under the key prompt."),
    ] = None,
    *,
    max_new_tokens: options.MaxNewTokens = 128,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="B", help="Decode the prompts of a .jsonl file B at a time; each gives a line of JSON."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --batch-size: file for the lines. Not given: standard output."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --out: go on behind the lines that are there already.")
    ] = False,
    choices: options.Choices,
    method: options.Method = None,
    window: options.Window = None,
    ngram: options.Ngram = None,
    guesses: options.Guesses = None,
    budget: options.Budget = None,
    memory: options.MemoryFile = None,
    loading: options.Loading,
    pack: options.Pack = None,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Continue a prompt, greedily unless --do-sample. On a terminal, tokens that came in one step have one colour.

    With --batch-size the answers are the same, as lines of JSON in the order of the prompts.

    --out keeps them whatever ends the run, --resume goes on behind them. Exit code 1: a prompt failed.
    """
    with terminal(output) as term:
        lookahead = options.lookahead_of(method, window, ngram, guesses, budget=budget, memory=memory)
        options.check_max_new_tokens(max_new_tokens)
        batch = batch_of(source, prompt, prompt_file, batch_size, out, resume=resume)
        choices = choices.settled(batch.seed if batch else None)
        if batch and choices.num_beams > 1:
            raise ConfigError("num-beams", choices.num_beams, "a beam search is for one prompt: leave out --batch-size")
        prompts = [] if batch else read_prompts(source, prompt, prompt_file)
        from lade.cli.loading import load, remembering

        subject = load(loading, term=term, pack=pack)
        lookahead = remembering(subject, lookahead, memory)
        if batch:
            from lade.cli.batch_answers import Recipe
            from lade.cli.batch_run import carry_out

            carry_out(batch, Recipe(subject, lookahead, choices, max_new_tokens), term, quiet=json)
        else:
            _run(subject, prompts, lookahead, choices, max_new_tokens, term, json=json)


def _run(
    subject: Subject,
    prompts: list[str],
    lookahead: Lookahead,
    choices: options.Choices,
    max_new_tokens: int,
    term: Terminal,
    *,
    json: bool,
) -> None:
    from lade.cli.decoding import check_served, decode, warn_of_length

    encoded = [subject.encode(text) for text in prompts]  # all are checked before the first one is decoded
    check_served(subject, lookahead, choices)
    warn_of_length(subject, max(map(len, encoded)), max_new_tokens, term)
    begin = partial(decode, subject, lookahead=lookahead, choices=choices, max_new_tokens=max_new_tokens, term=term)
    for number, (text, ids) in enumerate(zip(prompts, encoded, strict=True)):
        if number and not json:
            term.write("\n")
        run = _one(subject, text, ids, partial(begin, ids), term, json=json)
        if run.interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)


def _one(
    subject: Subject, text: str, ids: list[int], decode: Callable[..., Generation], term: Terminal, *, json: bool
) -> Generation:
    """Decode one prompt and write what came of it; `decode` wants its `on_step` only."""
    from lade.cli.painter import Painter, legend

    if json:
        run = decode(on_step=lambda step: None)
        term.write_json({**run.as_dict(subject), "packed": subject.packed})
        return run
    if term.interactive:
        term.write(text if len(text) <= _LONGEST_ECHO else "..." + text[-_LONGEST_ECHO:], "dim")
    painter = Painter(subject, term, context=ids if term.interactive else ())
    run = decode(on_step=painter)
    painter.finish()
    if term.interactive and run.config and run.choices.num_beams == 1:
        term.say(legend())
    if run.interrupted:
        term.say("interrupted", "yellow")
    term.say(run.summary(), "dim")
    return run
