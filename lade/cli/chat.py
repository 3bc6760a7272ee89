"""`lade chat`: talk to a model, with line editing, history and input of several lines.

A line that ends with a backslash continues on the next one. Three double quotes open a text of several lines, and three
of them at the end of a line close it. Lines that are pasted together stay together.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import platformdirs
import typer

from lade import ConfigError, InputError, LadeError
from lade.cli.options import decoding as options
from lade.cli.prompts import check_text
from lade.cli.terminal import Terminal, count, terminal

if TYPE_CHECKING:
    from lade.cli.conversation import Conversation, Turn
    from lade.cli.loading import LoadedModel
    from lade.cli.run import Generation
    from lade.config import Lookahead


def described(choices: options.Choices, given: options.Choices, loaded: LoadedModel) -> str:
    """Return the line at the start of a chat that says how tokens are chosen, by choices as settled and as given."""
    if choices.do_sample:
        from lade.cli.loading import SAMPLING_FIELDS
        from lade.cli.run import generate_arguments

        arguments = generate_arguments(loaded, choices)
        values = ", ".join(f"{name} {arguments[name]:g}" for name in SAMPLING_FIELDS if name in arguments)
        limits = f": {values}" if values else ""
        if given.do_sample or given.temperature:
            return f"sampling{limits}"
        return f"sampling as the checkpoint asks{limits} · greedy with --temperature 0"
    if given.temperature == 0:
        return "greedy" + ("; the checkpoint asks for sampling" if _checkpoint_samples(loaded) else "")
    return "greedy, as the checkpoint asks for no sampling · sampling with --temperature T"


def _checkpoint_samples(loaded: LoadedModel) -> bool:
    return loaded.checkpoint_defaults.get("do_sample") is True


EXAMPLE = "Example:  [bold]lade chat --model Qwen/Qwen3-0.6B[/bold]"
HELP = """\
/help           show this list
/system TEXT    set the system prompt, from the next turn on; without TEXT: remove it
/image FILE     attach an image to the next turn
/retry          answer the last turn again
/reset          forget the conversation; the system prompt stays
/stats          statistics of this session
/quit           leave, as Ctrl-D does
A line that ends with a backslash continues on the next one.
\"\"\" opens a text of several lines, which ends with \"\"\"; in it, a / begins no command.
Ctrl-C stops an answer; the text so far stays in the conversation."""
_WITH_TEXT = ("/system", "/image")
_ALONE = ("/help", "/retry", "/reset", "/stats", "/quit", "/exit")


@options.grouped
def chat(
    *,
    max_new_tokens: options.MaxNewTokens = 256,
    choices: options.Choices,
    speed: options.Speed,
    loading: options.Loading,
    template: options.Template,
    no_history: Annotated[
        bool,
        typer.Option("--no-history", rich_help_panel="Conversation", help="Do not save a history of the lines typed."),
    ] = False,
    output: options.Output,
) -> None:
    """Chat with a model. The conversation and its KV cache are kept; /help lists the commands.

    Tokens are chosen as the checkpoint's generation_config asks, unless options say otherwise.
    """
    with terminal(output) as term:
        lookahead = speed.lookahead()
        loading.check_layout(speed.pack, invariant=speed.invariant)
        choices.settled(by_default=True)  # whether the checkpoint samples is not known yet
        if choices.num_beams > 1:
            raise ConfigError("num-beams", choices.num_beams, "not available in a chat: use lade generate")
        options.check_max_new_tokens(max_new_tokens)
        template.check()
        from lade.cli.loading import load, with_memory
        from lade.cli.run import check_served

        loaded = load(loading, term=term, pack=speed.pack, images=None, invariant=speed.invariant)
        lookahead = with_memory(loaded, lookahead, speed.memory)
        settled = choices.settled(by_default=_checkpoint_samples(loaded))
        check_served(loaded, lookahead, settled)
        lines = LineInput(None if no_history else history_path())
        talk = Chat(loaded, template, lookahead, settled, max_new_tokens, term, lines)
        talk.begin(described(settled, choices, loaded), template.system)
        talk.run()


class Chat:
    """Reads turns and commands, and answers them, each with the next seed of the settled choices."""

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

    def begin(self, description: str, system: str | None) -> None:
        """Introduce the model, and set the system prompt; raises `InputError` where it is not supported."""
        if system is not None:
            self._conversation.set_system(system)
        loaded, kind = self._loaded, type(self._loaded.model).__name__
        self._term.say(f"{loaded.name} · {kind} · {loaded.dtype}{loaded.layout} · /help lists the commands", "dim")
        self._term.say(description, "dim")
        if not self._conversation.templated:
            note = "This model has no chat template: turns and answers are one text, which it continues."
            self._term.say(note, "dim")
        if self._lines.problem:
            self._term.say(self._lines.problem, "yellow")

    def run(self) -> None:
        """Read and answer until /quit or the end of input."""
        going = True
        while going and (entry := self._read()) is not None:
            text = entry.text.strip()
            if _is_command(text) and not entry.quoted:
                going = self._execute(text)
            elif text:
                self._say(text if self._conversation.templated else entry.text)

    def _read(self) -> Entry | None:
        """Return the next entry; None at the end of input."""
        try:
            return self._lines.entry("you> ")
        except KeyboardInterrupt:
            self._term.say("\n/quit or Ctrl-D ends the chat", "dim")
            return Entry("")
        except UnicodeDecodeError as problem:
            raise InputError(f"the input is not UTF-8 at byte {problem.start}: type or save it as UTF-8") from problem

    def _execute(self, text: str) -> bool:
        """Execute a command; return False if it ends the chat."""
        name, *others = text.split(maxsplit=1)
        rest = "".join(others)
        try:
            if rest and name in _ALONE:
                raise InputError(f"{name} takes no argument")
            match name:
                case "/quit" | "/exit":
                    return False
                case "/help":
                    self._term.say(HELP)
                case "/system":
                    self._set_system(rest)
                case "/image":
                    self._attach_image(rest)
                case "/retry":
                    self._answer(self._conversation.retry())
                case "/reset":
                    self._conversation.reset()
                    self._term.say("conversation cleared", "dim")
                case "/stats":
                    self._say_stats()
                case _:
                    self._term.say(f"unknown command {name}: /help lists the commands", "yellow")
        except InputError as problem:
            self._term.fail(problem)
        return True

    def _set_system(self, text: str) -> None:
        had = self._conversation.system is not None
        if text:
            check_text(text, "the system prompt")
        self._conversation.set_system(text or None)
        now = "system prompt set" if text else "system prompt removed"
        self._term.say(now if text or had else "there is no system prompt", "dim")

    def _attach_image(self, file: str) -> None:
        """Attach an image to the next turn."""
        if not file:
            raise InputError("/image needs a file: /image FILE")
        self._conversation.attach_image(Path(file).expanduser())
        self._term.say(f"{file!r} goes with the next turn", "dim")

    def _say(self, text: str) -> None:
        try:
            check_text(text, "the turn")
            self._answer(self._conversation.next_turn(text))
        except InputError as problem:
            self._term.fail(problem)

    def _answer(self, turn: Turn) -> None:
        """Answer a turn; Ctrl-C ends the answer, not the chat."""
        from lade.cli.run import Interrupt

        self._fed = len(turn.prompt) - self._conversation.cached
        try:
            with Interrupt():
                answer = self._decode(turn)
                self._conversation.add_answer(turn, answer)
        except KeyboardInterrupt:
            self._conversation.drop_cache()
            self._term.say("interrupted: the turn was dropped", "yellow")
            return
        except LadeError as problem:
            self._conversation.drop_cache()
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
        if reason := self._cut_off_mark(prompt, answer, room):
            self._term.say(reason, "yellow")
        self._term.say(answer.summary(), "dim")
        if answer.config is not None and not self._answers:  # later ones: /stats
            self._term.say(answer.stats.explain(), "dim")
        return answer

    def _cut_off_mark(self, prompt: list[int], answer: Generation, room: int) -> str | None:
        """Return why an answer is incomplete; None if it is complete."""
        context = self._loaded.context
        if answer.interrupted:
            return "[interrupted]"
        if context and len(prompt) + len(answer.token_ids) >= context:
            return f"[cut off: the context of {context} tokens is full; /reset starts over]"
        if answer.finish_reason == "stop":
            return None
        return f"[cut off after {room} tokens; --max-new-tokens allows more]"

    def _say_stats(self) -> None:
        context = self._loaded.context
        of = f" of {context}" if context else ""
        length = f"{count(self._conversation.turns, 'turn')}, {self._conversation.tokens} tokens"
        self._term.say(f"conversation: {length}{of}, {self._conversation.cached} in the cache")
        self._term.say(f"prefill of the last turn: {self._fed} new tokens")
        self._term.say(self._total.summary())
        if self._total.config is not None:
            self._term.say(self._total.stats.explain())


def _is_command(text: str) -> bool:
    """Return True for a command; of several lines, such as a pasted log, the first word has to be a known one."""
    return text.startswith("/") and ("\n" not in text or text.split(maxsplit=1)[0] in (*_ALONE, *_WITH_TEXT))


_QUOTES = '"""'
_MORE = "...> "
_LONGEST_HISTORY = 1000


@dataclass(frozen=True)
class Entry:
    """Text typed by the user."""

    text: str  # one line or several, without the marks that join them
    quoted: bool = False  # it stood in triple quotes, so that it is not a command


def history_path() -> Path:
    """Return the file of the chat history."""
    return Path(platformdirs.user_state_dir("lookahead-decoding", appauthor=False)) / "chat_history"


class LineInput:
    """Standard input, line by line."""

    def __init__(self, history: Path | None = None) -> None:
        self.problem: str | None = None  # why the history cannot be kept; None if it can
        self._history = history  # file of the lines typed on a terminal; None keeps them in memory
        self._readline = _readline() if self.edits else None
        if self._readline is not None:
            self._load_history()

    @property
    def edits(self) -> bool:
        """True if lines can be edited, as input and output are a terminal."""
        return sys.stdin.isatty() and sys.stdout.isatty()

    def entry(self, prompt: str) -> Entry | None:
        """Return the next line, or joined lines; None at the end of input. Ctrl-C drops the entry."""
        line = self._line(prompt)
        if line is None:
            return None
        if line.lstrip().startswith(_QUOTES):
            return Entry(self._quoted(line.lstrip().removeprefix(_QUOTES)), quoted=True)
        lines = [line]
        while lines[-1].endswith("\\") and (more := self._line(_MORE)) is not None:
            lines[-1:] = [lines[-1][:-1], more]
        return Entry("\n".join(lines))

    def _quoted(self, line: str | None) -> str:
        """Return the text up to the closing quotes, or to the end of input."""
        lines: list[str] = []
        while line is not None and not line.rstrip().endswith(_QUOTES):
            lines.append(line)
            line = self._line(_MORE)
        if line is not None:
            lines.append(line.rstrip().removesuffix(_QUOTES))
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        """Return the next line without its newline; None at the end of input."""
        if not self.edits:
            if sys.stdin.isatty():
                sys.stderr.write(prompt)  # standard output carries answers only
                sys.stderr.flush()
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        known = self._history_length()
        try:
            line = input(prompt)
        except EOFError:
            return None
        self._append_history(self._history_length() - known)
        return line

    def _history_length(self) -> int:
        return 0 if self._readline is None else self._readline.get_current_history_length()

    def _load_history(self) -> None:
        assert self._readline is not None
        if "libedit" not in (self._readline.__doc__ or ""):
            self._readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one entry
        self._readline.set_history_length(_LONGEST_HISTORY)
        if self._history is None:
            return
        try:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)  # private
            self._readline.read_history_file(self._history)
        except OSError as problem:
            self._drop_history(problem)

    def _append_history(self, lines: int) -> None:
        """Append the latest lines to the history at once, as a chat may be killed, or run beside another one."""
        if self._readline is None or self._history is None or lines < 1:
            return
        try:
            if hasattr(self._readline, "append_history_file"):
                self._readline.append_history_file(lines, self._history)
            else:  # built on libedit
                self._readline.write_history_file(self._history)
        except OSError as problem:
            self._drop_history(problem)

    def _drop_history(self, problem: OSError) -> None:
        self.problem = f"the history cannot be kept in {str(self._history)!r}: {problem.strerror or problem}"
        self._history = None


def _readline() -> ModuleType | None:
    """Return the readline module, whose import gives `input` editing and history; None where Python lacks it."""
    try:
        import readline
    except ImportError:
        return None
    return readline
