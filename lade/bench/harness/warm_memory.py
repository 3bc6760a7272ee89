"""The memories that methods keep from one prompt to the next, saved so that an interrupted run continues as it was.

A memory is saved before results.json has the prompt that it has learned last, under the number of prompts done by then;
the older one is removed afterwards. So there is one that fits results.json whenever the process ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lade.bench.harness.arms import Arm
from lade.errors import InputError
from lade.memory import Memory


class KeptMemories:
    """See above.

    Args:
        arms: of which those with a memory are looked after.
        folder: where to save; None: nothing is saved.
        tokenizer: of the model; the files are tied to it.
    """

    def __init__(self, arms: Sequence[Arm], folder: Path | None, tokenizer: Any) -> None:
        self._arms = [arm for arm in arms if arm.memory is not None]
        self._folder, self._tokenizer = folder, tokenizer
        self._at: int | None = None

    def open(self, done: int, *, fresh: bool) -> None:
        """Have the memories be what they were after the first `done` prompts.

        Args:
            done: number of prompts.
            fresh: whether the next one begins a series, for which memories are empty.

        Raises:
            InputError: they were never saved.
        """
        at, self._at = self._at, None  # until the prompt is done they are neither the old ones nor the new ones
        if not fresh and at == done:
            return
        for arm in self._arms:
            arm.memory = Memory() if fresh else self._load(arm, done)

    def close(self, done: int) -> None:
        """Save them as they are after the first `done` prompts."""
        self._at = done
        for arm in self._arms:
            if arm.memory is not None and self._folder is not None:
                arm.memory.save(self._path(arm, done), self._tokenizer)

    def remove(self, done: int) -> None:
        """Remove what was saved after the first `done` prompts."""
        for arm in self._arms:
            if self._folder is not None:
                self._path(arm, done).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all that was saved: the run is complete."""
        for arm in self._arms:
            for file in [] if self._folder is None else self._folder.glob(self._path(arm, "*").name):
                file.unlink()

    def _path(self, arm: Arm, done: int | str) -> Path:
        assert self._folder is not None
        return self._folder / f"{arm.method.name.replace(' ', '-')}.{done}.memory"

    def _load(self, arm: Arm, done: int) -> Memory:
        if self._folder is None or not self._path(arm, done).is_file():
            name = arm.method.name
            raise InputError(f"the memory of {name} after {done} prompts is not there: begin again with another --out")
        return Memory.load(self._path(arm, done), self._tokenizer)
