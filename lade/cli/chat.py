"""`lade chat`: talk to a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lade.cli.line_input import Entry, LineInput, history_path
from lade.cli.options import decoding as options
from lade.cli.options.decoding import Choices
from lade.cli.prompts import check_text
from lade.cli.terminal import Terminal, terminal
from lade.errors import ConfigError, InputError, LadeError

if TYPE_CHECKING:
    from lade.cli.conversation import Conversation, Turn
    from lade.cli.loading.load import LoadedModel
    from lade.cli.run import Generation
    from lade.config import Lookahead


_NO_BEAMS = "a chat shows answers as they come, beams only when complete: leave it out, or use lade generate"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


def check_choices(choices: Choices, *, greedy: bool) -> None:
    """Find out before a model is loaded what is wrong with the options.

    Args:
        choices: as the command line has them.
        greedy: whether it has `--greedy`.

    Raises:
        ConfigError, InputError: out of range, or in contradiction.
    """
    replace(choices, do_sample=True).settled()  # whether there will be sampling is not known yet
    if choices.num_beams > 1:
        raise ConfigError("num-beams", choices.num_beams, _NO_BEAMS)
    if greedy and choices.do_sample:
        raise ConfigError("greedy", True, "it contradicts --do-sample: leave one of them out")
    for name in _SAMPLING:
        value = getattr(choices, name)
        if greedy and value is not None:
            raise ConfigError(name.replace("_", "-"), value, "only sampling uses it: leave it out, or --greedy")


def chosen(choices: Choices, loaded: LoadedModel, *, greedy: bool) -> Choices:
    """The same, sampling where options or checkpoint ask for it, with a seed then.

    Raises:
        ConfigError: an option that only sampling uses, where there is none.
    """
    return replace(choices, do_sample=choices.do_sample or (_asks(loaded) and not greedy)).settled()


def described(choices: Choices, loaded: LoadedModel, *, greedy: bool, do_sample: bool) -> str:
    """One line for the start of a chat.

    Args:
        choices: settled ones.
        loaded: has the checkpoint's checkpoint_defaults.
        greedy: whether the command line has `--greedy`.
        do_sample: whether it has `--do-sample`.
    """
    if choices.do_sample:
        from lade.cli.loading.checkpoint import SAMPLING_FIELDS
        from lade.cli.run import generate_arguments

        given = generate_arguments(loaded, choices)
        values = ", ".join(f"{name} {given[name]:g}" for name in SAMPLING_FIELDS if name in given)
        limits = f": {values}" if values else ""
        return (
            f"samples as --do-sample asks{limits}"
            if do_sample
            else f"samples as the checkpoint asks{limits} · --greedy: not"
        )
    if greedy:
        return "takes the likeliest tokens as --greedy asks" + (
            "; the checkpoint would sample" if _asks(loaded) else ""
        )
    return "takes the likeliest tokens, as the checkpoint asks for no sampling · --do-sample: samples"


def _asks(loaded: LoadedModel) -> bool:
    return loaded.checkpoint_defaults.get("do_sample") is True


EXAMPLE = "Example:  [bold]lade chat --model Qwen/Qwen3-0.6B[/bold]"
HELP = """\
/help           this
/system TEXT    instructions for the model, from the next turn on; without TEXT: none
/image FILE     show the model an image with the next turn
/retry          answer the last turn again
/reset          forget the conversation; the system prompt stays
/save FILE      write the conversation to a file
/load FILE      continue the conversation of a file
/stats          figures of this session
/quit           leave (so does the end of input, Ctrl-D)
A line that ends with a backslash continues on the next one.
\"\"\" opens a text of several lines, which ends with \"\"\"; in it, a / begins no command.
Ctrl-C stops an answer; what was said so far stays in the conversation."""
_WITH_TEXT = ("/system", "/image", "/save", "/load")
_ALONE = ("/help", "/retry", "/reset", "/stats", "/quit", "/exit")


@options.grouped
def chat(
    *,
    max_new_tokens: options.MaxNewTokens = 256,
    choices: options.Choices,
    greedy: Annotated[
        bool,
        typer.Option(
            "--greedy",
            rich_help_panel="Choosing tokens",
            help="Take the most likely token each time, though the checkpoint asks for sampling.",
        ),
    ] = False,
    speed: options.Speed,
    loading: options.Loading,
    template: options.Template,
    no_history: Annotated[
        bool,
        typer.Option(
            "--no-history", rich_help_panel="Conversation", help="Do not read or write the file of lines typed."
        ),
    ] = False,
    output: options.Output,
) -> None:
    """Talk to a model. It keeps the conversation and its KV cache; /help lists what else one can say.

    Tokens are chosen as the checkpoint's generation_config asks, which the first lines say.
    """
    with terminal(output) as term:
        lookahead = speed.lookahead()
        loading.check_layout(speed.pack, invariant=speed.invariant)
        check_choices(choices, greedy=greedy)
        options.check_max_new_tokens(max_new_tokens)
        template.check()
        from lade.cli.loading.load import load, remembering
        from lade.cli.run import check_served

        loaded = load(loading, term=term, pack=speed.pack, images=None, invariant=speed.invariant)
        lookahead = remembering(loaded, lookahead, speed.memory)
        settled = chosen(choices, loaded, greedy=greedy)
        check_served(loaded, lookahead, settled)
        lines = LineInput(None if no_history else history_path())
        talk = Chat(loaded, template, lookahead, settled, max_new_tokens, term, lines)
        talk.begin(described(settled, loaded, greedy=greedy, do_sample=choices.do_sample), template.system)
        talk.run()


class Chat:
    """The loop around a conversation.

    Args:
        loaded: the model and its tokenizer.
        template: how turns become a prompt.
        lookahead: as in `lade.generate`.
        choices: settled ones; each answer has a seed of its own.
        max_new_tokens: of one answer.
        term: is written to.
        lines: is read from.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        template: options.Template,
        lookahead: Lookahead,
        choices: options.Choices,
        max_new_tokens: int,
        term: Terminal,
        lines: LineInput,
    ) -> None:
        from lade.cli.conversation import Conversation
        from lade.cli.run import Generation

        self._loaded, self._lookahead, self._choices = loaded, lookahead, choices
        self._max_new_tokens, self._term, self._lines = max_new_tokens, term, lines
        self._conversation: Conversation = Conversation(loaded, template)
        self._total, self._answers, self._fed = Generation(), 0, 0

    def begin(self, manner: str, system: str | None) -> None:
        """Say what answers and how, and take the system prompt.

        Raises:
            InputError: the model has no place for a system prompt.
        """
        if system is not None:
            self._conversation.instruct(system)
        loaded = self._loaded
        self._term.say(
            f"{loaded.name} · {type(loaded.model).__name__} · {loaded.dtype}{loaded.layout} · /help lists the commands",
            "dim",
        )
        self._term.say(manner, "dim")
        if not self._conversation.templated:
            self._term.say(
                "This model has no chat template: what you say and what it says are one text, continued.", "dim"
            )
        if self._lines.problem:
            self._term.say(self._lines.problem, "yellow")

    def run(self) -> None:
        """Until /quit or the end of input."""
        going = True
        while going and (entry := self._read()) is not None:
            text = entry.text.strip()
            if _is_command(text) and not entry.quoted:
                going = self._obey(text)
            elif text:
                self._say(text if self._conversation.templated else entry.text)

    def _read(self) -> Entry | None:
        """The next entry; None at the end of input."""
        try:
            return self._lines.entry("you> ")
        except KeyboardInterrupt:
            self._term.say("\n/quit or Ctrl-D ends the chat", "dim")
            return Entry("")
        except UnicodeDecodeError as problem:
            raise InputError(f"the input is not UTF-8 at byte {problem.start}: type or save it as UTF-8") from problem

    def _obey(self, text: str) -> bool:
        """Carry out a command; whether the chat continues."""
        name, *others = text.split(maxsplit=1)
        rest = "".join(others)
        try:
            if rest and name in _ALONE:
                raise InputError(f"{name} takes nothing after it: give {name}")
            match name:
                case "/quit" | "/exit":
                    return False
                case "/help":
                    self._term.say(HELP)
                case "/system":
                    self._instruct(rest)
                case "/image":
                    self._show(rest)
                case "/retry":
                    self._answer(self._conversation.retry())
                case "/reset":
                    self._conversation.reset()
                    self._term.say("the conversation is forgotten", "dim")
                case "/save" | "/load":
                    self._exchange(name, rest)
                case "/stats":
                    self._say_stats()
                case _:
                    self._term.say(f"there is no {name}: /help lists the commands", "yellow")
        except InputError as problem:
            self._term.fail(problem)
        return True

    def _instruct(self, text: str) -> None:
        had = self._conversation.system is not None
        if text:
            check_text(text, "the system prompt")
        self._conversation.instruct(text or None)
        now = "the system prompt holds from the next turn on" if text else "the system prompt is gone"
        self._term.say(now if text or had else "there is no system prompt", "dim")

    def _show(self, file: str) -> None:
        """Show an image with the next turn."""
        if not file:
            raise InputError("/image needs the name of a file: give /image FILE")
        self._conversation.show(Path(file).expanduser())
        self._term.say(f"{file!r} goes with the next turn", "dim")

    def _exchange(self, name: str, file: str) -> None:
        """Save the conversation to a file, or load one."""
        from lade.cli import conversation

        if not file:
            raise InputError(f"{name} needs the name of a file: give {name} FILE")
        path = Path(file).expanduser()
        if name == "/save" and not self._conversation.turns:
            raise InputError("nothing was said yet: there is nothing to save")
        if name == "/save" and self._conversation.has_images:
            raise InputError("a conversation with images cannot be saved, since its file holds text alone")
        if name == "/load":
            self._conversation.take(conversation.load(path))
            self._term.say(f"continuing after {self._said()}", "dim")
        else:
            conversation.save(path, self._conversation.messages, self._loaded.name)
            self._term.say(f"{self._said()} saved to {str(path)!r}", "dim")

    def _said(self) -> str:
        """How long the conversation is."""
        turns = self._conversation.turns
        return f"{turns} turn{'' if turns == 1 else 's'}, {self._conversation.tokens} tokens"

    def _say(self, text: str) -> None:
        try:
            check_text(text, "the turn")
            self._answer(self._conversation.ask(text))
        except InputError as problem:
            self._term.fail(problem)

    def _answer(self, turn: Turn) -> None:
        """Answer a turn; Ctrl-C at any moment ends the answer, not the chat."""
        from lade.cli.run import Interrupt

        self._fed = len(turn.prompt) - self._conversation.cached
        try:
            with Interrupt():
                answer = self._decode(turn)
                self._conversation.answered(turn, answer)
        except KeyboardInterrupt:
            self._conversation.forget_cache()
            self._term.say("interrupted: the turn is as if not said", "yellow")
            return
        except LadeError as problem:
            self._conversation.forget_cache()
            self._term.fail(problem)
            return
        self._total.absorb(answer)
        self._answers += 1

    def _decode(self, turn: Turn) -> Generation:
        from lade.cli.run import Painter, decode

        prompt = turn.prompt
        room = self._loaded.room(prompt, self._max_new_tokens, within=True)
        painter = Painter(self._loaded, self._term, () if self._conversation.templated else prompt)
        try:
            answer = decode(
                self._loaded,
                prompt,
                lookahead=self._lookahead,
                choices=self._choices.after(self._answers),
                max_new_tokens=room,
                term=self._term,
                on_step=painter,
                cache=self._conversation.cache,
                more=turn.media,
            )
        finally:
            painter.finish()
        if reason := self._cut(prompt, answer, room):
            self._term.say(reason, "yellow")
        self._term.say(answer.summary(), "dim")
        return answer

    def _cut(self, prompt: list[int], answer: Generation, room: int) -> str | None:
        """Why an answer is not complete; None if it is."""
        context = self._loaded.context
        if answer.interrupted:
            return "[interrupted]"
        if context and len(prompt) + len(answer.token_ids) >= context:
            return f"[cut: the model's context of {context} tokens is full; /reset starts again]"
        if len(answer.token_ids) < room or self._ended(answer):
            return None
        return f"[cut after {room} tokens; --max-new-tokens allows more]"

    def _ended(self, answer: Generation) -> bool:
        """Whether the last token ended the text: a token of the model's that does so, or the end of a --stop text."""
        from lade.cli.conversation import stop_ids

        text = self._loaded.tokenizer.decode(answer.token_ids)
        return answer.token_ids[-1] in stop_ids(self._loaded.model) or any(
            stop in text for stop in self._choices.stop or ()
        )

    def _say_stats(self) -> None:
        context = self._loaded.context
        of = f" of {context}" if context else ""
        self._term.say(f"conversation: {self._said()}{of}, {self._conversation.cached} in the cache")
        self._term.say(f"the last turn fed {self._fed} new tokens before its answer")
        self._term.say(self._total.summary())


def _is_command(text: str) -> bool:
    """Whether it is meant as one; of several lines, such as a log that was pasted, the first word has to be known."""
    return text.startswith("/") and ("\n" not in text or text.split(maxsplit=1)[0] in (*_ALONE, *_WITH_TEXT))
