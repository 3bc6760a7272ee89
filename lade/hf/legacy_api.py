"""The original library's API, name by name, on current transformers.

    import os; os.environ["USE_LADE"] = "1"
    import lade; lade.augment_all(); lade.config_lade(LEVEL=5, WINDOW_SIZE=7, GUESS_SET_SIZE=7, DEBUG=0)

After that every greedy `model.generate` is accelerated while the environment variable USE_LADE is 1, and nothing is
changed while it is not. This is the only module that reads an environment variable, patches transformers, keeps global
settings, or prints: the original API is defined that way. New code calls `model.generate(custom_generate=lade.decode)`.

Source of the names: github.com/hao-ai-lab/LookaheadDecoding, lade/utils.py.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationMixin

from lade.config import LookaheadConfig
from lade.errors import ConfigError, UnsupportedError
from lade.hf.refusals import fall_back
from lade.hf.session import Session
from lade.model.prepared import Prepared
from lade.stats import Stats

LOGGED_GENERATIONS = 65_536
"""Maximum number of log entries, those of the last generations, so that memory stays bounded."""


class _Settings:
    """Settings of `config_lade`, and the log since then: sums, and an entry [tokens, forward passes] per generation."""

    def __init__(self) -> None:
        self.lookahead, self.debug = LookaheadConfig(adaptive=False, prompt_ngrams=False), False
        self.clear_log()

    def clear_log(self) -> None:
        """Forget all generations."""
        self.tokens = self.passes = 0
        self.entries = deque[list[int]](maxlen=LOGGED_GENERATIONS)


_settings = _Settings()
_original: list[Callable[..., Any]] = []


def augment_all() -> None:
    """Let every later greedy `model.generate` use lookahead decoding while USE_LADE=1; idempotent."""
    if _original:
        return
    original = GenerationMixin._sample
    _original.append(original)
    GenerationMixin._sample = _augmented(original)  # type: ignore[method-assign]


def restore_all() -> None:
    """Undo `augment_all`."""
    while _original:
        GenerationMixin._sample = _original.pop()  # type: ignore[method-assign]


def config_lade(
    WINDOW_SIZE: int | None = None,
    LEVEL: int | None = None,
    DEBUG: int | None = None,
    GUESS_SET_SIZE: int | None = None,
    ALWAYS_FWD_ONE: int | None = None,
    SPLIT_FLAG: int | None = None,
    DIST_WORKERS: int | None = None,
    POOL_FROM_PROMPT: int | None = None,
    backend: str = "nccl",
    USE_FLASH: int | None = None,
) -> None:
    """Set W (WINDOW_SIZE), N (LEVEL), G (GUESS_SET_SIZE) and other settings; None keeps the present value.

    Args:
        WINDOW_SIZE: W, columns of the lookahead window.
        LEVEL: N, length of the n-grams.
        DEBUG: 1 prints the acceleration summary after each generation.
        GUESS_SET_SIZE: G, guesses per step.
        ALWAYS_FWD_ONE: 1 (the default) moves the window by one position per step. 0 is not available.
        SPLIT_FLAG: splits attention in the original library; ignored, as it has no effect on the tokens.
        DIST_WORKERS: 1. More is not available here: with `lade.parallel` several processes share each tree.
        POOL_FROM_PROMPT: 1 adds n-grams of the prompt and of the accepted text to the pool.
        backend: communication backend of `DIST_WORKERS`; ignored.
        USE_FLASH: 0. Flash attention kernels take no tree mask, so 1 is not available: SDPA is used.

    Raises:
        ConfigError: W, N or G is out of range. The settings stay as they were.

    A setting that is not available causes a warning, and decoding stays exact.
    """
    now = _settings.lookahead
    _settings.lookahead = LookaheadConfig(
        window=now.window if WINDOW_SIZE is None else WINDOW_SIZE,
        ngram=now.ngram if LEVEL is None else LEVEL,
        guesses=now.guesses if GUESS_SET_SIZE is None else GUESS_SET_SIZE,
        prompt_ngrams=now.prompt_ngrams if POOL_FROM_PROMPT is None else bool(POOL_FROM_PROMPT),
    )
    if DEBUG is not None:
        _settings.debug = bool(DEBUG)
    _settings.clear_log()
    for name, value, quiet, instead in (
        ("ALWAYS_FWD_ONE", ALWAYS_FWD_ONE, (None, 1, True), "the window moves by one position a step"),
        ("SPLIT_FLAG", SPLIT_FLAG, (None, 0, False), "one attention call serves the whole tree"),
        ("DIST_WORKERS", DIST_WORKERS, (None, 0, 1), "one process decodes; see lade.parallel"),
        ("USE_FLASH", USE_FLASH, (None, 0, False), "attention runs on the model's own SDPA or eager kernels"),
    ):
        if value not in quiet:
            warnings.warn(f"{name}={value} is not available yet: {instead}", stacklevel=2)


def log_history(clear: bool = False) -> None:
    """Print tokens, forward passes and their ratio over all accelerated generations since `config_lade`."""
    tokens, steps = _settings.tokens, _settings.passes
    if clear:
        _settings.clear_log()
    print("LADE LOG - OVERALL GEN: ", tokens, " STEPS: ", steps, " AVG COMPRESS RATIO: ", tokens / max(steps, 1))  # noqa: T201


def save_log(log_dir: str | os.PathLike[str]) -> None:
    """Write the log with `torch.save`: a list of [tokens, forward passes], one entry per generation.

    It has the last 65,536 generations since `config_lade`; `log_history` adds up all of them.
    """
    if not Path(log_dir).parent.is_dir():
        raise ConfigError("log_dir", str(log_dir), "its folder does not exist; create it first")
    torch.save(list(_settings.entries), log_dir)


def _augmented(original: Callable[..., Any]) -> Callable[..., Any]:
    # `wraps` keeps the signature, from which transformers reads what its loop accepts.
    @functools.wraps(original)
    def sample(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        prepared = Prepared(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, wrapper=model
        )
        session, stats = None, Stats()
        if os.environ.get("USE_LADE", "0") not in ("", "0"):
            options = {"config": _settings.lookahead, "stats": stats, "streamer": streamer}
            try:
                session = Session(prepared, **options, prompt_streamed=True)  # which transformers has done already
            except UnsupportedError as problem:
                fall_back(model, problem, stats)
        if session is None:
            return original(model, *prepared.positional, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs)
        output = session.run()
        _log(stats)
        return output

    return sample


def _log(stats: Stats) -> None:
    passes = stats.steps + stats.generations  # including the prefill of each row
    _settings.tokens += stats.new_tokens
    _settings.passes += passes
    _settings.entries.append([stats.new_tokens, passes])
    if _settings.debug:
        ratio = stats.new_tokens / passes
        print("\n==========================ACCELERATION===SUMMARY======================================")  # noqa: T201
        print("Generated tokens: ", stats.new_tokens, "Total steps: ", passes, " Compression ratio: ", round(ratio, 2))  # noqa: T201
        print("======================================================================================", end="")  # noqa: T201
