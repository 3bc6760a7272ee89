"""`lade generate`: continue prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lade.cli.batch.request import batch_of
from lade.cli.options import decoding as options
from lade.cli.prompts import read_prompts
from lade.cli.terminal import ASIDE, EXIT_INTERRUPTED, Terminal, terminal
from lade.errors import ConfigError

if TYPE_CHECKING:
    from lade.cli.batch.answers import Recipe
    from lade.cli.prompts import Prompt
    from lade.cli.run import Generation

EXAMPLE = 'Example:  [bold]lade generate "def mean(values):" --max-new-tokens 100[/bold]'
_LONGEST_ECHO = 2000
_PANEL = "Many prompts"


@options.grouped
def generate(
    text: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt. Not given, or -: standard input.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt, too.")] = None,
    *,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One prompt, or of .jsonl one a line: prompt or messages.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    template: options.Template,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="B", help="Decode B prompts of a .jsonl file at a time.", rich_help_panel=_PANEL),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the answers, as JSON lines.", rich_help_panel=_PANEL),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", metavar="", help="Go on after the lines in --out.", rich_help_panel=_PANEL),
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
    """Answer a prompt, or continue it: a model with a chat template answers, unless --raw.

    Decodes greedily unless --do-sample. On a terminal, tokens that came in one step have one colour.

    With --batch-size the answers are the same, as lines of JSON in the order of the prompts.

    --out keeps them whatever ends the run, --resume goes on after them. Exit code 1: a prompt failed.
    """
    with terminal(output) as term:
        lookahead = options.lookahead_of(method, window, ngram, guesses, budget=budget, memory=memory)
        options.check_max_new_tokens(max_new_tokens)
        template.check()
        batch = batch_of(text, prompt, prompt_file, batch_size, out, resume=resume)
        choices = choices.settled(batch.seed if batch else None)
        if batch and choices.num_beams > 1:
            raise ConfigError("num-beams", choices.num_beams, "a beam search is for one prompt: leave out --batch-size")
        if text in (None, "-") and prompt is None and prompt_file is None:
            term.working("reading standard input")
        prompts = [] if batch else read_prompts(text, prompt, prompt_file)
        from lade.cli.batch.answers import Recipe
        from lade.cli.encoder import Encoder
        from lade.cli.loading.load import load, remembering

        subject = load(loading, term=term, pack=pack)
        lookahead = remembering(subject, lookahead, memory)
        recipe = Recipe(subject, Encoder(subject, template), lookahead, choices, max_new_tokens)
        if batch:
            from lade.cli.batch.run import carry_out

            carry_out(batch, recipe, term, quiet=json)
        else:
            _run(recipe, prompts, term, json=json)


def _run(recipe: Recipe, prompts: list[Prompt], term: Terminal, *, json: bool) -> None:
    from lade.cli.run import check_served, decode, warn_of_length

    subject, lookahead, choices = recipe.subject, recipe.lookahead, recipe.choices
    encoded = [recipe.encode(prompt) for prompt in prompts]  # all are checked before the first one is decoded
    check_served(subject, lookahead, choices)
    warn_of_length(subject, max(map(len, encoded)), recipe.max_new_tokens, term)
    wanted = recipe.max_new_tokens
    begin = partial(decode, subject, lookahead=lookahead, choices=choices, max_new_tokens=wanted, term=term)
    for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        if number and not json:
            term.write("\n")
        one = partial(begin, ids)
        run = _as_json(recipe, one, term) if json else _as_text(recipe, prompt, ids, one, term)
        if run.interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)


def _as_json(recipe: Recipe, decode: Callable[..., Generation], term: Terminal) -> Generation:
    """Decode one prompt and write an object; `decode` wants its `on_step` only."""
    run = decode(on_step=lambda step: term.working("decoding"))
    term.write_json({**run.as_dict(recipe.subject), "packed": recipe.subject.packed})
    return run


def _as_text(
    recipe: Recipe, prompt: Prompt, ids: list[int], decode: Callable[..., Generation], term: Terminal
) -> Generation:
    """Decode one prompt and write the text as it comes; `decode` wants its `on_step` only."""
    from lade.cli.step_colours import Painter, legend

    if term.interactive:
        shown = prompt.text if len(prompt.text) <= _LONGEST_ECHO else "..." + prompt.text[-_LONGEST_ECHO:]
        term.write(shown + ("\n" if recipe.encode.templated else ""), "dim")
    painter = Painter(recipe.subject, term, context=ids)
    run = decode(on_step=painter)
    painter.finish(_mark(recipe, ids, run) if term.interactive else "")
    if term.interactive and run.config and run.choices.num_beams == 1:
        term.say(legend(), ASIDE)
    if run.interrupted:
        term.say("interrupted", "yellow")
    term.say(run.summary(), ASIDE)
    return run


def _mark(recipe: Recipe, ids: list[int], run: Generation) -> str:
    """What stands after a text that was cut off."""
    if run.finish_reason != "length":
        return ""
    subject, wanted = recipe.subject, recipe.max_new_tokens
    full = subject.room(ids, wanted) < wanted
    why = f"the context of {subject.context} tokens is full" if full else f"--max-new-tokens {wanted}"
    return f" [cut off: {why}]"
