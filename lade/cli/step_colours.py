"""Writes a text as it comes, so that one sees which tokens came together."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from lade.cli.loading.loaded_model import LoadedModel
from lade.cli.terminal import Terminal
from lade.hf.detokenizer import Detokenizer
from lade.stats import Step

RUNS = ("bold green", "bold cyan")


class Palette:
    """Styles for steps: plain for a single token, and alternating colours for those that yielded several."""

    def __init__(self) -> None:
        self._runs = 0

    def style(self, tokens: int) -> str:
        """The style of the next step, which yielded this many tokens."""
        if tokens < 2:
            return ""
        self._runs += 1
        return RUNS[self._runs % len(RUNS)]


class Painter:
    """Writes steps as text, coloured on a terminal.

    Args:
        loaded: has the tokenizer.
        term: is written to.
        context: ids of the prompt that the text continues.
    """

    def __init__(self, loaded: LoadedModel, term: Terminal, context: Iterable[int] = ()) -> None:
        self._term, self._palette = term, Palette()
        self._detokenizer = Detokenizer(loaded.tokenizer, context)

    def __call__(self, step: Step) -> None:
        """Write what a step completes."""
        style = self._palette.style(len(step.tokens))
        self._write(self._detokenizer.push(step.tokens), style)

    def finish(self, mark: str = "") -> None:
        """Write what was held back, and end the line, with a mark that is not of the text."""
        self._write(self._detokenizer.flush(), "")
        self._write(mark, "dim")
        self._write("\n", "")

    def _write(self, text: str, style: str) -> None:
        if text:
            self._term.write(text, style)


def legend() -> Text:
    """What the colours mean."""
    return Text.assemble(
        ("colours: ", "dim"), "one token in a step", (" · ", "dim"), ("several", RUNS[0]), (" or ", "dim"),
        ("several tokens", RUNS[1]), (" in one step", "dim"),
    )  # fmt: skip
