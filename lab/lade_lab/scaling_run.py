"""Measurement of the scaling law: lookahead decoding at many sizes on the same prompts.

for each prompt                    plain decoding's answer
for each N, for each W = G         written down when it is complete
    for each prompt                an answer, compared with plain decoding's
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from lade.errors import ConfigError, InputError
from lade_lab.harness.arms import OwnArm, Place, TransformersArm, digest, generate_arguments
from lade_lab.harness.benchmark import command_line, environment_of
from lade_lab.harness.mismatch import Judge
from lade_lab.harness.prompts import Prompts
from lade_lab.results import Method, Mismatch, Model, Settings
from lade_lab.scaling_law import NAME, Point, Reference, Scaling
from lade_lab.terms import differences
from lade_lab.workloads import Item, Workload

WINDOWS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 60)
NGRAMS = (3, 4, 5, 6, 7)

_REFERENCE = Method("hf", "hf")
_PASS_TOKENS = 64  # a pass costs about as much before its first token as these, on the models this is run with


class Study:
    """Iterate over it for the share that is done; `scaling` has each size as soon as all prompts have been answered.

    Interrupt it wherever you like: a size that is not complete is dropped, nothing else is.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        source: the prompts; of a conversation the first turn.
        windows: W of the sizes, which is G as well.
        ngrams: N of the sizes.
        record: of the model.
        settings: greedy; how long answers are.
        prompt_ngrams: whether n-grams of the prompt and of the text are guesses too.
        folder: for `scaling.json`, made if need be; None: nothing is written.
        resume: whether to continue what is in the folder; its sizes need not be the same.
        command: for the record.

    Raises:
        ConfigError: a size is out of range, or the settings do not decode greedily.
        InputError: there is a result already, or one of something else; a prompt cannot be continued.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        source: Workload,
        windows: Sequence[int] = WINDOWS,
        ngrams: Sequence[int] = NGRAMS,
        *,
        record: Model,
        settings: Settings,
        prompt_ngrams: bool = True,
        folder: str | os.PathLike[str] | None = None,
        resume: bool = False,
        command: Sequence[str] = (),
    ) -> None:
        _check(windows, ngrams, settings)
        self._model, self._items = model, source.items
        prompts = Prompts(tokenizer, model)
        first_turns = [replace(item, turns=item.turns[:1]) for item in source.items]
        self.outgrowing = prompts.check_room(first_turns, settings.max_new_tokens)
        self._prompts = [prompts.ids(item) for item in source.items]
        self._judge = Judge(model, settings, _REFERENCE.name)
        self._path = None if folder is None else Path(folder) / NAME
        self.scaling = Scaling(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command_line(command),
            environment=environment_of(model),
            model=record,
            settings=settings,
            workload=source.record,
            prompt_ngrams=prompt_ngrams,
        )
        if self._path is not None:
            self._open(self._path, resume)
        known = {(point.window, point.ngram) for point in self.scaling.points}
        sizes = [(window, ngram) for ngram in sorted(set(ngrams)) for window in sorted(set(windows))]
        self.todo = [size for size in sizes if size not in known]
        self.kept = len(sizes) - len(self.todo)

    def __iter__(self) -> Iterator[float]:
        """Measure what is left to measure."""
        if not self.todo:
            self._write(complete=True)
            yield 1.0
            return
        self._write(complete=False)  # a folder that cannot be written to is found out now
        done, total = 0.0, len(self._prompts) * (_work(0, 2) + sum(_work(*size) for size in self.todo))
        answers = []
        for answer in self._references():
            answers.append(answer)
            done += _work(0, 2)
            yield done / total
        for number, (window, ngram) in enumerate(self.todo, start=1):
            point, found = Point(window, ngram, window, [], [], []), list[Mismatch]()
            arm = OwnArm(self._method(point), self._model, generate_arguments(self.scaling.settings))
            for item, prompt, answer in zip(self._items, self._prompts, answers, strict=True):
                found += self._answered(arm, point, item, prompt, answer)
                done += _work(window, ngram)
                if len(point.steps) < len(answers):
                    yield done / total
            self.scaling.points.append(point)
            self.scaling.mismatches += found
            self._write(complete=number == len(self.todo))
            yield done / total

    def _answered(self, arm: OwnArm, point: Point, item: Item, prompt: list[int], answer: list[int]) -> list[Mismatch]:
        """Answer a prompt, add it to the point, and compare."""
        completion = arm.complete(prompt, 0, self.scaling.settings.max_new_tokens)
        point.steps.append(completion.stats.steps)
        point.fed.append(completion.stats.fed_tokens)
        point.accepted.append(completion.stats.accepted_tokens)
        found = self._judge.compare(self._place(item), arm.method.name, prompt, answer, completion.tokens)
        return [] if found is None else [found]

    def _references(self) -> Iterator[list[int]]:
        """Plain decoding's answers, which must be the same when a run is continued."""
        arm = TransformersArm(_REFERENCE, self._model, generate_arguments(self.scaling.settings))
        known = {reference.prompt: reference for reference in self.scaling.references}
        references = []
        for item, prompt in zip(self._items, self._prompts, strict=True):
            tokens = arm.complete(prompt, 0, self.scaling.settings.max_new_tokens).tokens
            references.append(Reference(item.id, digest(prompt), len(tokens), digest(tokens)))
            if known and known.get(item.id) != references[-1]:
                raise InputError(
                    f"prompt {item.id!r} or plain decoding's answer to it is not what it was in {str(self._path)!r}: "
                    "continue with the same prompts, model and versions, or give another --out"
                )
            yield tokens
        if all(reference.new_tokens < 2 for reference in references):
            raise InputError("no answer has more than one token, so there are no steps: give other prompts")
        self.scaling.references = references

    def _method(self, point: Point) -> Method:
        sizes = {"window": point.window, "ngram": point.ngram, "guesses": point.guesses}
        name = f"lookahead {point.window},{point.ngram},{point.guesses}"
        return Method(name, "lookahead", {**sizes, "prompt_ngrams": self.scaling.prompt_ngrams})

    def _place(self, item: Item) -> Place:
        return Place(self.scaling.workload.name, item.id, turn=0, seed=0, repeat=0)

    def _open(self, path: Path, resume: bool) -> None:
        """Take over what is in the folder, which must be of the same model, prompts and settings."""
        check_folder(path.parent, resume=resume)
        if path.exists():
            there = Scaling.load(path)
            for name, old, new in differences(_terms(there), _terms(self.scaling)):
                raise InputError(f"{name} is {new!r} here, but {old!r} in {str(path)!r}: give another --out")
            self.scaling = replace(there, complete=False)
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise InputError(
                f"folder {str(path.parent)!r} cannot be created ({problem}): give another --out"
            ) from problem

    def _write(self, *, complete: bool) -> None:
        self.scaling.complete = complete
        if self._path is not None:
            self.scaling.save(self._path)


def check_folder(folder: Path, *, resume: bool) -> None:
    """Raise `InputError` for a folder that has a result already, which would be lost."""
    if not resume and (folder / NAME).exists():
        raise InputError(f"{str(folder / NAME)!r} exists already: continue with --resume, or give another --out")


def _terms(scaling: Scaling) -> Mapping[str, Any]:
    """Return the settings that must agree when a run is continued."""
    records_of = {name: asdict(getattr(scaling, name)) for name in ("model", "settings", "workload")}
    return {**records_of, "prompt_ngrams": scaling.prompt_ngrams}


def _work(window: int, ngram: int) -> float:
    """Return the rough relative cost of an answer."""
    return _PASS_TOKENS + 2.0 * window * (ngram - 1)


def _check(windows: Sequence[int], ngrams: Sequence[int], settings: Settings) -> None:
    for name, values, least in (("windows", windows, 1), ("ngrams", ngrams, 2)):
        if not values or min(values) < least:
            raise ConfigError(name, list(values), f"give whole numbers >= {least}")
    if settings.max_new_tokens < 2:
        raise ConfigError("max_new_tokens", settings.max_new_tokens, "give a whole number >= 2: the first is prefill's")
    if settings.temperature is not None:
        raise ConfigError("temperature", settings.temperature, "the law is measured greedily: give None")
