"""Ctrl-C, obeyed between two steps, so that tokens, cache and statistics agree."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
from transformers import StoppingCriteria


class Interrupt(StoppingCriteria):
    """While it is entered, the first Ctrl-C sets `requested`; the second raises `KeyboardInterrupt` at once.

    As a stopping criterion it ends what does not come step by step.
    Outside of the main thread, and where Ctrl-C is ignored, it changes nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(previous):
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """`[rows]` of whether Ctrl-C was pressed."""
        return torch.full((input_ids.shape[0],), self.requested, device=input_ids.device, dtype=torch.bool)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
