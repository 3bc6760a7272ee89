"""Job of `lade generate --batch-size`: prompts as requests of an engine, results in the order of the prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from lade import Engine, Handle, Memory
from lade.cli.batch.files import Batch, Entry
from lade.cli.batch.runner import AHEAD, Job, Pending
from lade.cli.encoder import Encoder
from lade.cli.prompts import Prompt
from lade.cli.run import Generation, GenerationPlan, check_served, finish_reason, generate_arguments, warn_of_length
from lade.cli.terminal import Terminal, one_line
from lade.config import LookaheadConfig
from lade.errors import InputError, UnsupportedError


class PromptJob(Job[int]):
    """Decodes the prompts of a batch; items are their line numbers.

    Args:
        batch: prompts and result file.
        plan: model and decoding settings, the same for all prompts.
        term: terminal for results without a file, and for failures.

    Raises:
        ConfigError, InputError, UnsupportedModelError: a prompt or the model cannot be served, or the result file was
            written with other settings.
    """

    noun, ordered = "prompts", True

    def __init__(self, batch: Batch, plan: GenerationPlan, term: Terminal) -> None:
        self._batch, self._plan, self._term = batch, plan, term
        self.path, self.rows = None if batch.file is None else batch.file.path, batch.size
        self._ids = {line: _encoded(plan.encode, each, batch.place(line)) for line, each in batch.prompts.items()}
        check_served(plan.loaded, plan.lookahead, plan.choices)
        warn_of_length(plan.loaded, max(map(len, self._ids.values())), plan.max_new_tokens, term)
        self._lookahead = _with_memory(plan.config)
        self._retried: list[int] = []  # an earlier run recorded an error for them
        unwritten = list(batch.prompts)
        if batch.file is not None:
            batch.file.require(plan.terms)
            self._retried = batch.file.failed
            unwritten = unwritten[len(batch.file.lines) :]
        self._amended: dict[int, Entry] = {}
        self.total, self.pending = len(batch.prompts), [*self._retried, *unwritten]
        self._steps = self._accepted = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run an engine; results of retried prompts replace their errors once all of them are there, or on exit."""
        file = self._batch.file
        try:
            with Engine(self._plan.loaded.model, max_rows=self.rows, max_waiting=AHEAD * self.rows) as self._engine:
                self._probe()
                if file is not None:
                    file.truncate()
                try:
                    yield
                finally:
                    self._amend()
        except UnsupportedError as problem:
            raise InputError(f"{problem.reason}: leave out --batch-size to decode one prompt at a time") from problem

    def submit(self, item: int) -> Handle:
        """Add a prompt to the engine."""
        plan, ids = self._plan, self._ids[item]
        prompt = torch.tensor([ids], device=plan.loaded.model.device)  # [1, prompt length]
        return self._engine.add(
            prompt,
            attention_mask=torch.ones_like(prompt),
            lookahead=self._lookahead,
            seed=plan.choices.seed,
            max_new_tokens=plan.loaded.room(ids, plan.max_new_tokens),
            **{**generate_arguments(plan.loaded, plan.choices), **plan.grammar_arguments},
        )

    def write(self, item: int, pending: Pending) -> bool:
        """Append the result of a prompt, or keep it for the place of the error that it replaces."""
        entry = self.entry(item, pending)
        if "error" not in entry:
            self.new_tokens += entry["new_tokens"]
            self._steps += entry["steps"]
            self._accepted += entry["new_tokens"] - 1  # the first token comes from the prefill
        if item in self._retried:
            self._amended[item] = entry
            if len(self._amended) == len(self._retried):
                self._amend()
        elif self._batch.file is None:
            self._term.write_json(entry)
        else:
            self._batch.file.append(entry)
        return "error" not in entry

    def entry(self, line: int, handle: Any) -> Entry:
        """Return the result line of a prompt; a failure is reported at once and recorded under `error`."""
        plan, named = self._plan, {"line": line, **self._batch.prompts[line].as_dict()}
        try:
            output: Any = handle.result()
        except Exception as problem:  # noqa: BLE001 - one failed prompt does not end the batch
            reason = f"{type(problem).__name__}: {one_line(problem)}"
            self._term.say(f"failed: {self._batch.place(line)}: {reason}", "yellow")
            return {**named, "error": reason, **plan.terms}
        ids = self._ids[line]
        run = Generation(output[0, len(ids) :].tolist(), ids, handle.stats, plan.config, plan.choices)
        run.finish_reason = finish_reason(plan.loaded, run, plan.loaded.room(ids, plan.max_new_tokens))
        return {**named, **run.as_dict(plan.loaded), "settings": plan.settings}

    def details(self) -> list[str]:
        """Return the mean tokens per step."""
        return [f"{self._accepted / self._steps if self._steps else 0.0:.2f} tokens per step"]

    def _probe(self) -> None:
        """Submit and cancel the longest prompt, so that the engine rejects it before the run starts, if at all."""
        longest = max(self._ids, key=lambda line: len(self._ids[line]))
        try:
            self.submit(longest).cancel()
        except InputError as problem:
            raise InputError(f"{self._batch.place(longest)}: {problem}") from problem

    def _amend(self) -> None:
        if self._amended and self._batch.file is not None:
            self._batch.file.amend(self._amended)
            self._amended, self._retried = {}, [line for line in self._retried if line not in self._amended]


def _with_memory(config: LookaheadConfig | None) -> LookaheadConfig | None:
    """Return the configuration with one draft memory for all prompts of the run, unless it has one."""
    if config is None or not config.adaptive or config.memory is not None:
        return config
    return replace(config, memory=Memory())


def _encoded(encode: Encoder, prompt: Prompt, place: str) -> list[int]:
    try:
        return encode(prompt)
    except InputError as problem:
        raise InputError(f"{place}: {problem}") from problem
