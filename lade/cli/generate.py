"""`lade generate`: continue prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lade import ConfigError, InputError
from lade.cli.options import decoding as options
from lade.cli.options import option
from lade.cli.prompts import Prompt, check_text, decoded, read_file, read_text
from lade.cli.terminal import ASIDE, EXIT_INTERRUPTED, Terminal, terminal

if TYPE_CHECKING:
    from lade import Step
    from lade.cli.encoder import Encoder
    from lade.cli.loading import LoadedModel
    from lade.cli.run import Generation
    from lade.config import Lookahead

EXAMPLE = 'Example:  [bold]lade generate "def mean(values):" --max-new-tokens 100[/bold]'
_LONGEST_ECHO = 2000


@dataclass(frozen=True)
class Asked:
    """Prompts, and options of their answers."""

    text: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text of the prompt. Default, and for -: standard input.")
    ] = None
    prompt: str | None = option(
        None, "TEXT", "The prompt as an option, for texts that begin with a dash.", "--prompt", "-p"
    )
    prompts: Path | None = option(None, "FILE", "A text file with one prompt, or a .jsonl file with one per line.")
    max_new_tokens: options.MaxNewTokens = 128
    image: list[Path] | None = option(None, "FILE", "Image before the prompt. Repeatable.")
    prediction_file: Path | None = option(None, "FILE", "Expected answer, such as the file to be edited.")

    @property
    def piped(self) -> bool:
        """True if the prompt comes from standard input."""
        return self.text in (None, "-") and self.prompt is None and self.prompts is None

    def read(self) -> list[Prompt]:
        """Return the prompts; raises `InputError` without a source, for several, and for a prompt that is no text."""
        given = sum(each is not None for each in (self.text, self.prompt, self.prompts))
        if given > 1 or (not given and sys.stdin.isatty()):
            raise InputError(
                "exactly one prompt is needed: give it as an argument, as --prompts FILE, or through a pipe"
            )
        if self.prompts is not None:
            return read_file(self.prompts)
        text = self.text if self.prompt is None else self.prompt
        if text is None or self.piped:
            text = decoded(sys.stdin.buffer.read(), "standard input").removesuffix("\n")
            if not text:
                raise InputError("standard input is empty: give a prompt there, as an argument, or as --prompts FILE")
        check_text(text, "the prompt")
        return [Prompt(text)]

    def check_images(self, prompts: list[Prompt], template: options.Template) -> None:
        """Raise `ConfigError` if images do not go with the prompts."""
        if not self.image:
            return
        given = str(self.image[0])
        if self.prompts is not None and (len(prompts) != 1 or prompts[0].messages is not None):
            raise ConfigError("image", given, "needs a single prompt of text: give it as an argument")
        if template.raw:
            raise ConfigError("image", given, "needs the chat template: leave out --raw")

    def prediction(self, prompts: list[Prompt], lookahead: Lookahead, choices: options.Choices) -> str | None:
        """Return the expected answer, if given; raises `ConfigError` if nothing would use it."""
        path = self.prediction_file
        if path is None:
            return None
        if len(prompts) != 1:
            raise ConfigError("prediction-file", str(path), "needs a single prompt")
        if lookahead is None or choices.num_beams > 1:
            method = "--method plain" if lookahead is None else "--num-beams"
            raise ConfigError("prediction-file", str(path), f"not used with {method}")
        return read_text(path, "prediction")


@options.grouped
def generate(
    asked: Asked,
    *,
    template: options.Template,
    choices: options.Choices,
    form: options.StructuredOutput,
    speed: options.Speed,
    loading: options.Loading,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Answer a prompt, or continue it if the model has no chat template or with --raw.

    Decoding is greedy without --temperature. On a terminal, tokens of one step share a colour.

    lade batch decodes many prompts together.
    """
    with terminal(output) as term:
        lookahead = speed.lookahead()
        loading.check_layout(speed.pack, invariant=speed.invariant)
        options.check_max_new_tokens(asked.max_new_tokens)
        template.check()
        choices = choices.settled()
        if asked.piped:
            term.show_status("reading standard input")
        prompts = asked.read()
        asked.check_images(prompts, template)
        grammar = form.read()
        predicted = asked.prediction(prompts, lookahead, choices)
        from lade.cli.encoder import Encoder
        from lade.cli.loading import join_processes, load, with_memory
        from lade.machine import leading

        split, pack, invariant = join_processes(term), speed.pack, speed.invariant
        loaded = load(loading, term=term, pack=pack, images=bool(asked.image), invariant=invariant, processes=split)
        form.check(grammar, loaded.tokenizer, loaded.model.generation_config.eos_token_id)
        lookahead = with_memory(loaded, lookahead, speed.memory)
        more: dict[str, Any] = {}
        if predicted is not None:
            more["prediction"] = loaded.tokenizer(predicted, add_special_tokens=False)["input_ids"]
        if grammar is not None:
            more |= {"grammar": grammar, "tokenizer": loaded.tokenizer}
        answers = _Answers(loaded, Encoder(loaded, template), lookahead, choices, asked.max_new_tokens, more, term)
        with leading(loaded.model, split) as leads:
            if leads:
                answers.write(prompts, asked.image, json=json)


@dataclass(frozen=True)
class _Answers:
    """Answers prompts one after the other, and writes the answers."""

    loaded: LoadedModel
    encode: Encoder
    lookahead: Lookahead
    choices: options.Choices
    max_new_tokens: int
    more: Mapping[str, Any]  # further arguments of `lade.generate`
    term: Terminal

    def write(self, prompts: list[Prompt], images: list[Path] | None, *, json: bool) -> None:
        """Check all prompts before the first is answered, as JSON or as text; images go with a single prompt."""
        from lade.cli.encoder import ImagePrompt
        from lade.cli.run import check_served, warn_of_length

        if images:
            encoded = [self.encode.with_images(prompts[0], images)]
        else:
            encoded = [ImagePrompt(self.encode(prompt), {}) for prompt in prompts]
        check_served(self.loaded, self.lookahead, self.choices)
        warn_of_length(self.loaded, max(len(each.ids) for each in encoded), self.max_new_tokens, self.term)
        for number, (prompt, (ids, media)) in enumerate(zip(prompts, encoded, strict=True)):
            if number and not json:
                self.term.write("\n")
            run = self._as_json(ids, media) if json else self._as_text(prompt, ids, media)
            if run.interrupted:
                raise typer.Exit(EXIT_INTERRUPTED)

    def _decode(self, ids: list[int], media: Mapping[str, Any], on_step: Callable[[Step], None]) -> Generation:
        from lade.cli.run import decode

        return decode(
            self.loaded,
            ids,
            lookahead=self.lookahead,
            choices=self.choices,
            max_new_tokens=self.max_new_tokens,
            term=self.term,
            on_step=on_step,
            more={**self.more, **media},
        )

    def _as_json(self, ids: list[int], media: Mapping[str, Any]) -> Generation:
        run = self._decode(ids, media, on_step=lambda step: self.term.show_status("decoding"))
        self.term.write_json(run.as_dict(self.loaded))
        return run

    def _as_text(self, prompt: Prompt, ids: list[int], media: Mapping[str, Any]) -> Generation:
        from lade.cli.run import Painter, legend

        term, painter = self.term, Painter(self.loaded, self.term, context=ids)
        echo = [self._echo(prompt)] if term.interactive else []  # with the first token, as the status goes then

        def show(step: Step) -> None:
            if echo:
                term.write(echo.pop(), "dim")
            painter(step)

        run = self._decode(ids, media, on_step=show)
        painter.finish(self._cut_off_mark(ids, run) if term.interactive else "")
        if term.interactive and run.config and run.choices.num_beams == 1:
            term.say(legend(), ASIDE)
        if run.interrupted:
            term.say("interrupted", "yellow")
        term.say(run.summary(), ASIDE)
        if run.config is not None:
            term.say(run.stats.explain(), ASIDE)
        return run

    def _echo(self, prompt: Prompt) -> str:
        """Return the prompt, or its end, to show before its continuation."""
        shown = prompt.text if len(prompt.text) <= _LONGEST_ECHO else "..." + prompt.text[-_LONGEST_ECHO:]
        return shown + ("\n" if self.encode.templated else "")

    def _cut_off_mark(self, ids: list[int], run: Generation) -> str:
        """Return the mark after a text that was cut off."""
        if run.finish_reason != "length":
            return ""
        full = self.loaded.room(ids, self.max_new_tokens) < self.max_new_tokens
        context, limit = self.loaded.context, f"--max-new-tokens {self.max_new_tokens}"
        return f" [cut off: {f'the context of {context} tokens is full' if full else limit}]"
