"""`lade demo`: watch plain and lookahead decoding write the same text, the likeliest or a sampled one."""

from __future__ import annotations

from dataclasses import dataclass
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
_SLOW_MOTION = 20.0  # the embedded model writes several hundred tokens a second


@dataclass(frozen=True)
class _Show:
    """How a race is shown: as "live" panels, so many times slower than it ran, as "text", or at the end as "json"."""

    style: str
    slow_motion: float


@options.grouped
def demo(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="A text of your own.")] = None,
    prompts: Annotated[int, typer.Option(metavar="N", help="How many of the built-in prompts.")] = 3,
    max_new_tokens: options.MaxNewTokens = 120,
    *,
    do_sample: Annotated[bool, typer.Option("--do-sample", help="Sample in all rounds, not only in the last.")] = False,
    temperature: Annotated[float, typer.Option(metavar="T", help="Of sampled rounds.")] = 0.7,
    seed: Annotated[int, typer.Option(metavar="S", help="Of sampled rounds; both sides draw with it.")] = 0,
    window: options.Window = None,
    ngram: options.Ngram = None,
    guesses: options.Guesses = None,
    loading: options.Loading,
    pack: options.Pack = None,
    slow_motion: Annotated[
        float | None,
        typer.Option(metavar="X", help="Show it X times slower than it ran [the embedded model: 20, others: 1]."),
    ] = None,
    plain_text: Annotated[bool, typer.Option("--plain-text", help="Paragraphs instead of moving panels.")] = False,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Plain and lookahead decoding side by side: the same text, fewer passes, less time."""
    with terminal(output) as term:
        sampled = options.Choices(do_sample=True, temperature=temperature, seed=seed).settled()
        options.check_max_new_tokens(max_new_tokens)
        if slow_motion is not None and slow_motion < 1:
            raise ConfigError("slow_motion", slow_motion, "give a number >= 1")
        if prompts < 1:
            raise ConfigError("prompts", prompts, "give a whole number >= 1")
        if prompt is not None:
            check_text(prompt, "the prompt")
        from lade.cli.decoding import check_served
        from lade.cli.loading import load

        subject = load(loading, term=term, pack=pack)
        config = _sizes(window, ngram, guesses, on_cpu=subject.model.device.type == "cpu")
        check_served(subject, config, sampled)
        style = "json" if json else "text" if plain_text or not term.interactive else "live"
        show = _Show(style, slow_motion or (_SLOW_MOTION if loading.model is None else 1.0))
        rounds = _rounds(_texts(prompt, prompts), sampled, all_sampled=do_sample)
        races = _run(subject, rounds, config, max_new_tokens, term, show)
        _conclude(races, term, json=json, packed=subject.packed)


def _sizes(window: int | None, ngram: int | None, guesses: int | None, *, on_cpu: bool) -> LookaheadConfig:
    """What was asked for; else sizes that save time with so small a model.

    On a CPU a wide pass costs it more than it brings (docs/lab-log.md).
    """
    if on_cpu and window is ngram is guesses is None:
        return LookaheadConfig(window=0, ngram=5, guesses=3)
    config = options.lookahead_of("lookahead", window, ngram, guesses)
    assert isinstance(config, LookaheadConfig)
    return config


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
    show: _Show,
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
            _show(race, f"round {len(races) + 1} of {len(rounds)} · {manner(choices)}", text, term, show)
        except KeyboardInterrupt:
            if races and show.style != "json":
                _conclude(races, term, json=False)
            term.say("interrupted", "yellow")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        races.append(race)
    return races


def _show(race: Race, title: str, text: str, term: Terminal, show: _Show) -> None:
    from lade.cli.views import LiveView, describe

    if show.style == "live":
        with LiveView(term, title, text, race, show.slow_motion) as view:
            race.run(view.draw)
        return
    race.run(draw=lambda: None)
    if show.style == "text":
        describe(term, title, text, race)


def _conclude(races: list[Race], term: Terminal, *, json: bool, packed: bool = False) -> None:
    from lade.cli.views import footnote, summary, verdict

    if json:
        same = all(race.same for race in races)
        term.write_json({"races": [race.as_dict() for race in races], "same_tokens": same, "packed": packed})
    else:
        term.out.print(summary(races))
        if term.interactive:
            term.out.print(footnote())
    different = [race for race in races if not race.same]
    if different:
        term.fail(f"{verdict(different[0])}; with --dtype float32 they must be equal: please report this")
        raise typer.Exit(EXIT_DIFFERENT)
