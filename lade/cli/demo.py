"""`lade demo`: watch plain and lookahead decoding write the same text, the likeliest or a sampled one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lade.cli import options
from lade.cli.prompts import check_text
from lade.cli.terminal import EXIT_INTERRUPTED, Terminal, terminal
from lade.config import LookaheadConfig
from lade.errors import ConfigError

if TYPE_CHECKING:
    from lade.cli.loading import Subject
    from lade.cli.race import Race

EXAMPLE = 'Example:  [bold]lade demo --prompt "class Stack:" --max-new-tokens 200[/bold]'
EXIT_DIFFERENT = 1
_WARMUP_TOKENS = 8


def demo(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="A text of your own.")] = None,
    prompts: Annotated[int, typer.Option(metavar="N", help="How many of the built-in prompts.")] = 3,
    max_new_tokens: options.MaxNewTokens = 160,
    *,
    do_sample: Annotated[bool, typer.Option("--do-sample", help="Sample in all rounds, not only in the last.")] = False,
    temperature: Annotated[float, typer.Option(metavar="T", help="Of sampled rounds.")] = 0.7,
    seed: Annotated[int, typer.Option(metavar="S", help="Of sampled rounds; both sides draw with it.")] = 0,
    window: options.Window = None,
    ngram: options.Ngram = None,
    guesses: options.Guesses = None,
    model: options.Model = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    plain_text: Annotated[bool, typer.Option("--plain-text", help="Paragraphs instead of moving panels.")] = False,
    json: options.Json = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
) -> None:
    """Plain and lookahead decoding side by side: the same text, fewer passes, less time."""
    with terminal(debug=debug, no_color=no_color) as term:
        config = options.lookahead_of("lookahead", window, ngram, guesses)
        assert isinstance(config, LookaheadConfig)
        sampled = options.Choices(do_sample=True, temperature=temperature, seed=seed).settled()
        options.check_max_new_tokens(max_new_tokens)
        if prompts < 1:
            raise ConfigError("prompts", prompts, "give a whole number >= 1")
        if prompt is not None:
            check_text(prompt, "the prompt")
        from lade.cli.decoding import check_served
        from lade.cli.loading import load

        subject = load(model, dtype=dtype, device=device, term=term)
        check_served(subject, config, sampled)
        style = "json" if json else "text" if plain_text or not term.interactive else "live"
        rounds = _rounds(_texts(prompt, prompts), sampled, all_sampled=do_sample)
        races = _run(subject, rounds, config, max_new_tokens, term, style)
        _conclude(races, term, json=json)


def _texts(prompt: str | None, count: int) -> list[str]:
    from lade.demo import embedded

    return [prompt] if prompt is not None else embedded.prompts()[:count]


def _rounds(texts: list[str], sampled: options.Choices, *, all_sampled: bool) -> list[tuple[str, options.Choices]]:
    """What is shown: every text greedily and the first one sampled too, or every text sampled."""
    if all_sampled:
        return [(text, sampled) for text in texts]
    return [*((text, options.GREEDY) for text in texts), (texts[0], sampled)]


def _run(
    subject: Subject,
    rounds: list[tuple[str, options.Choices]],
    config: LookaheadConfig,
    max_new_tokens: int,
    term: Terminal,
    style: str,
) -> list[Race]:
    from lade.cli.race import Race
    from lade.cli.views import manner

    encoded = [subject.encode(text) for text, _ in rounds]
    Race(subject, encoded[0], config, _WARMUP_TOKENS).run(draw=lambda: None)
    races: list[Race] = []
    for (text, choices), ids in zip(rounds, encoded, strict=True):
        room = subject.room(ids, max_new_tokens, within=True)
        race = Race(subject, ids, config, room, choices)
        try:
            _show(race, f"round {len(races) + 1} of {len(rounds)} · {manner(choices)}", text, term, style)
        except KeyboardInterrupt:
            if races and style != "json":
                _conclude(races, term, json=False)
            term.say("interrupted", "yellow")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        races.append(race)
    return races


def _show(race: Race, title: str, text: str, term: Terminal, style: str) -> None:
    from lade.cli.views import LiveView, describe

    if style == "live":
        with LiveView(term, title, text, race) as view:
            race.run(view.draw)
        return
    race.run(draw=lambda: None)
    if style == "text":
        describe(term, title, text, race)


def _conclude(races: list[Race], term: Terminal, *, json: bool) -> None:
    from lade.cli.views import footnote, summary, verdict

    if json:
        term.write_json({"races": [race.as_dict() for race in races], "same_tokens": all(race.same for race in races)})
    else:
        term.out.print(summary(races))
        if term.interactive:
            term.out.print(footnote())
    different = [race for race in races if not race.same]
    if different:
        term.fail(f"{verdict(different[0])}; with --dtype float32 they must be equal: please report this")
        raise typer.Exit(EXIT_DIFFERENT)
