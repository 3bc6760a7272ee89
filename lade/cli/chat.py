"""`lade chat`: talk to a model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lade.cli import options
from lade.cli.prompts import check_text
from lade.cli.terminal import Terminal, terminal
from lade.errors import ConfigError, InputError

if TYPE_CHECKING:
    from lade.cli.conversation import Conversation
    from lade.cli.decoding import Generation, Lookahead
    from lade.cli.loading import Subject

EXAMPLE = "Example:  [bold]lade chat --model Qwen/Qwen3-0.6B[/bold]"
_NO_BEAMS = "a chat shows answers as they come, beams only when complete: leave it out, or use lade generate"
HELP = """\
/help    this
/reset   forget the conversation
/stats   figures of this session
/quit    leave (so does the end of input, Ctrl-D)
Ctrl-C stops an answer; what was said so far stays in the conversation."""


@options.grouped
def chat(
    *,
    max_new_tokens: options.MaxNewTokens = 256,
    choices: options.Choices,
    method: options.Method = None,
    window: options.Window = None,
    ngram: options.Ngram = None,
    guesses: options.Guesses = None,
    budget: options.Budget = None,
    memory: options.MemoryFile = None,
    loading: options.Loading,
    pack: options.Pack = None,
    output: options.Output,
) -> None:
    """Talk to a model. It keeps the conversation and its KV cache; /help lists what else one can say."""
    with terminal(output) as term:
        lookahead = options.lookahead_of(method, window, ngram, guesses, budget=budget, memory=memory)
        choices = choices.settled()
        if choices.num_beams > 1:
            raise ConfigError("num-beams", choices.num_beams, _NO_BEAMS)
        options.check_max_new_tokens(max_new_tokens)
        from lade.cli.decoding import check_served
        from lade.cli.loading import load, remembering

        subject = load(loading, term=term, pack=pack)
        lookahead = remembering(subject, lookahead, memory)
        check_served(subject, lookahead, choices)
        Chat(subject, lookahead, choices, max_new_tokens, term).run()


class Chat:
    """The loop around a conversation.

    Args:
        subject: who answers.
        lookahead: as in `lade.generate`.
        choices: settled ones; each answer has a seed of its own.
        max_new_tokens: of one answer.
        term: is written to.
    """

    def __init__(
        self, subject: Subject, lookahead: Lookahead, choices: options.Choices, max_new_tokens: int, term: Terminal
    ) -> None:
        from lade.cli.conversation import Conversation
        from lade.cli.decoding import Generation

        self._subject, self._lookahead, self._choices = subject, lookahead, choices
        self._max_new_tokens, self._term = max_new_tokens, term
        self._conversation: Conversation = Conversation(subject)
        self._total, self._turns, self._fed = Generation(), 0, 0

    def run(self) -> None:
        """Until /quit or the end of input."""
        self._greet()
        while (line := self._read()) is not None:
            text = line.strip()
            match text:
                case "":
                    continue
                case "/quit" | "/exit":
                    return
                case "/help":
                    self._term.say(HELP)
                case "/reset":
                    self._conversation.reset()
                    self._term.say("the conversation is forgotten", "dim")
                case "/stats":
                    self._say_stats()
                case _ if text.startswith("/"):
                    self._term.say(f"there is no {text.split()[0]}: /help lists the commands", "yellow")
                case _:
                    self._turn(text if self._conversation.templated else line.rstrip("\n"))

    def _greet(self) -> None:
        subject = self._subject
        packed = ", packed" if subject.packed else ""
        self._term.say(
            f"{subject.name} · {type(subject.model).__name__} · {subject.dtype}{packed} · /help lists the commands",
            "dim",
        )
        if not self._conversation.templated:
            self._term.say(
                "This model has no chat template: what you say and what it says are one text, continued.", "dim"
            )

    def _read(self) -> str | None:
        """The next line; None at the end of input."""
        try:
            if sys.stdin.isatty():
                return input("you> ")
            return sys.stdin.readline() or None
        except EOFError:
            return None
        except KeyboardInterrupt:
            self._term.say("\n/quit or Ctrl-D ends the chat", "dim")
            return ""
        except UnicodeDecodeError as problem:
            raise InputError(f"the input is not UTF-8 at byte {problem.start}: type or save it as UTF-8") from problem

    def _turn(self, text: str) -> None:
        try:
            check_text(text, "the turn")
            prompt = self._conversation.ask(text)
        except InputError as problem:
            self._term.fail(problem)
            return
        self._fed = len(prompt) - self._conversation.cached
        answer = self._answer(prompt)
        self._conversation.answered(text, prompt, answer)
        self._total.absorb(answer)
        self._turns += 1

    def _answer(self, prompt: list[int]) -> Generation:
        from lade.cli.decoding import decode
        from lade.cli.painter import Painter

        context = self._subject.context
        room = self._subject.room(prompt, self._max_new_tokens, within=True)
        painter = Painter(self._subject, self._term, () if self._conversation.templated else prompt)
        answer = decode(
            self._subject,
            prompt,
            lookahead=self._lookahead,
            choices=self._choices.after(self._turns),
            max_new_tokens=room,
            term=self._term,
            on_step=painter,
            cache=self._conversation.cache,
        )
        painter.finish()
        if answer.interrupted:
            self._term.say("interrupted", "yellow")
        elif context and len(prompt) + len(answer.token_ids) >= context:
            self._term.say(f"the model's context of {context} tokens is full: /reset starts anew", "yellow")
        self._term.say(answer.summary(), "dim")
        return answer

    def _say_stats(self) -> None:
        conversation, context = self._conversation, self._subject.context
        of = f" of {context}" if context else ""
        self._term.say(
            f"{self._turns} turns · conversation: {conversation.tokens} tokens{of}, {conversation.cached} in the cache"
        )
        self._term.say(f"the last turn fed {self._fed} new tokens before its answer")
        self._term.say(self._total.summary())
