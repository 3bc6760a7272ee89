"""Prompts in, lines of JSON out: what the engine is asked for each, and what its answer is written as."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from time import sleep
from typing import Any

import torch

from lade import Engine, Handle, Memory
from lade.cli.batch.output import Entry
from lade.cli.batch.request import Batch
from lade.cli.encoder import Encoder
from lade.cli.loading.load import Subject
from lade.cli.options.decoding import Choices
from lade.cli.prompts import Prompt
from lade.cli.run import (
    Generation,
    check_served,
    config_dict,
    finish_reason,
    generate_arguments,
    warn_of_length,
)
from lade.cli.terminal import Terminal, one_line
from lade.config import Lookahead, LookaheadConfig
from lade.errors import InputError
from lade.hf.refusals import resolve

_POLL_S = 0.01


@dataclass(frozen=True)
class Recipe:
    """How all prompts are decoded.

    Attributes:
        subject: what generates.
        encode: makes ids of a prompt.
        lookahead: as in `lade.generate`.
        choices: settled ones.
        max_new_tokens: of each.
    """

    subject: Subject
    encode: Encoder
    lookahead: Lookahead
    choices: Choices
    max_new_tokens: int

    @property
    def settings(self) -> dict[str, Any]:
        """What was asked for, as far as the object that `--json` prints does not say it."""
        said = self.choices.as_dict()
        unsaid = {name: value for name, value in asdict(self.choices).items() if name not in said}
        asked = {"method": _method(self.config), "max_new_tokens": self.max_new_tokens, **unsaid}
        return {**asked, **self.subject.variant, **self.encode.settings}

    @property
    def config(self) -> LookaheadConfig | None:
        """The method and its sizes; None decodes plainly."""
        return resolve(self.lookahead)[0]

    @property
    def terms(self) -> dict[str, Any]:
        """What all lines of a file have alike."""
        return {
            "model": self.subject.name,
            "dtype": self.subject.dtype,
            "packed": self.subject.packed,
            "settings": self.settings,
            "config": config_dict(self.config),
            **self.choices.as_dict(),
        }


class Answers:
    """Turns the prompts of a batch into requests, and what came of them into lines.

    Attributes:
        new_tokens: of all answers so far.
        failed: prompts that have none, but an error.

    Raises:
        ConfigError, InputError, UnsupportedModelError: a prompt cannot be continued, or none can be so.
    """

    def __init__(self, batch: Batch, recipe: Recipe, term: Terminal) -> None:
        self._batch, self._recipe, self._term = batch, recipe, term
        subject = recipe.subject
        self._ids = {line: _encoded(recipe.encode, each, batch.place(line)) for line, each in batch.prompts.items()}
        check_served(subject, recipe.lookahead, recipe.choices)
        warn_of_length(subject, max(map(len, self._ids.values())), recipe.max_new_tokens, term)
        self._lookahead = _remembering(recipe.config)
        self.new_tokens, self.failed, self._steps, self._accepted = 0, 0, 0, 0

    @property
    def tokens_per_step(self) -> float:
        """Over all answers so far."""
        return self._accepted / self._steps if self._steps else 0.0

    def rehearse(self, engine: Engine) -> None:
        """Have the engine refuse at once what it would refuse in the middle: the longest text needs the most of it."""
        longest = max(self._ids, key=lambda line: len(self._ids[line]))
        try:
            self.begin(engine, longest).cancel()
        except InputError as problem:
            raise InputError(f"{self._batch.place(longest)}: {problem}") from problem

    def begin(self, engine: Engine, line: int) -> Handle:
        """Hand a prompt to the engine."""
        recipe, ids = self._recipe, self._ids[line]
        prompt = torch.tensor([ids], device=recipe.subject.model.device)
        return engine.add(
            prompt,
            attention_mask=torch.ones_like(prompt),
            lookahead=self._lookahead,
            seed=recipe.choices.seed,
            max_new_tokens=recipe.subject.room(ids, recipe.max_new_tokens),
            **generate_arguments(recipe.subject, recipe.choices),
        )

    def entry(self, line: int, handle: Handle) -> Entry:
        """The line of a request that is done; one that failed is said at once, and has the error in its line."""
        recipe, named = self._recipe, {"line": line, **self._batch.prompts[line].as_dict()}
        try:
            output: Any = handle.result()
        except Exception as problem:  # noqa: BLE001 - whatever ended this one, the others go on
            self.failed += 1
            reason = f"{type(problem).__name__}: {one_line(problem)}"
            self._term.say(f"failed: {self._batch.place(line)}: {reason}", "yellow")
            return {**named, "error": reason, **recipe.terms}
        ids = self._ids[line]
        tokens = output[0, len(ids) :].tolist()
        run = Generation(tokens, ids, handle.stats, recipe.config, recipe.choices)
        run.finish_reason = finish_reason(recipe.subject, run, recipe.subject.room(ids, recipe.max_new_tokens))
        self.new_tokens += len(tokens)
        self._steps += run.stats.steps
        self._accepted += run.stats.accepted_tokens
        packed = recipe.subject.packed
        return {**named, **run.as_dict(recipe.subject), "packed": packed, "settings": recipe.settings}


def in_order(
    lines: Iterable[int], begin: Callable[[int], Handle], at_a_time: int, stopped: Callable[[], bool]
) -> Generator[tuple[int, Handle]]:
    """Requests that are done, in the order of their prompts, with the numbers of these.

    Args:
        lines: numbers of prompts.
        begin: makes a request of one.
        at_a_time: how many may be under way.
        stopped: whether to end without those that are still under way; they are cancelled.
    """
    ahead, held = iter(lines), deque[tuple[int, Handle]]()
    try:
        while True:
            while held and held[0][1].done():
                yield held.popleft()
            if stopped():
                return
            room = at_a_time - sum(not handle.done() for _, handle in held)
            held.extend((line, begin(line)) for line in islice(ahead, room))
            if not held:
                return
            sleep(_POLL_S)
    finally:
        for _, handle in held:
            handle.cancel()


def _remembering(config: LookaheadConfig | None) -> LookaheadConfig | None:
    """With one memory for all prompts of a run, which are one user's, unless there is one."""
    if config is None or not config.adaptive or config.memory is not None:
        return config
    return replace(config, memory=Memory())


def _method(config: LookaheadConfig | None) -> str:
    """What it is called on the command line."""
    if config is None:
        return "plain"
    return "adaptive" if config.adaptive else "lookahead"


def _encoded(encode: Encoder, prompt: Prompt, place: str) -> list[int]:
    try:
        return encode(prompt)
    except InputError as problem:
        raise InputError(f"{place}: {problem}") from problem
