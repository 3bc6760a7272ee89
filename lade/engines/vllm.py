"""Drafts inside vLLM: a proposer of its `custom_class` speculative decoding, on model runner V1.

    vllm serve MODEL \
        --speculative-config '{"method": "custom_class", "model": "lade.engines.vllm.Proposer",
                               "num_speculative_tokens": 16}' \
        --additional-config '{"lade": {"memory": "chat.memory"}}'

vLLM hands a proposer tokens and row numbers. Two things more are taken from its runner:

- rows of logits, by wrapping `compute_logits` of the model that `load_model` is given;
- what was scheduled, by wrapping `GPUModelRunner.execute_model`: the names of requests, which of them
  have ended, and how many of each one's drafts were fed, which the scheduler and grammars cut.

Drafting is imported when a proposer is made, in the worker that needs it.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lade.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from lade.engines.drafter import EngineDrafter

VERSION = "0.32"  # the version of vLLM that this was tried with; its proposer interface is experimental
_COMPARED = 8  # tokens at a text's end by which it is known to be the one that was seen before
_HOOKED = "_lade_is_told"


class Proposer:
    """Drafts for the requests of one vLLM engine.

    Settings are those under `"lade"` in `--additional-config`:

    - `memory`: a file. It is loaded if it is there, and saved when the engine exits.
    - `price`: see `lade.EngineDrafter`; without it, what the engine's passes cost decides.

    Raises:
        UnsupportedError: this was not tried with that version of vLLM.
        ConfigError: a setting is not known, or out of range.
        InputError: the memory's file is damaged.
    """

    def __init__(self, vllm_config: Any) -> None:
        _check_version()
        from lade.engines.drafter import EngineDrafter
        from lade.memory import Memory

        settings = _settings(vllm_config.additional_config)
        model = vllm_config.model_config
        self._most, self._longest = vllm_config.speculative_config.num_speculative_tokens, model.max_model_len
        eos = getattr(model.hf_config, "eos_token_id", None)
        excluded = [] if eos is None else [eos] if isinstance(eos, int) else eos
        path = settings.get("memory")
        memory = Memory.load(path) if path is not None and os.path.exists(path) else Memory()
        self.drafter: EngineDrafter = EngineDrafter(
            model.get_vocab_size(), excluded, memory=memory, price=settings.get("price")
        )
        if path is not None:
            weakref.finalize(self, memory.save, path)
        self._runner: Any = None
        self._scheduled: Any = None
        self._packed: Any = None
        self._started: float | None = None
        self._last: tuple[int, int] | None = None  # fed and emitted by the last pass, if it was over drafts alone
        _hook_runner()

    def load_model(self, model: Any) -> None:
        """Have the rows of logits read that the target model computes."""
        original = model.compute_logits

        @functools.wraps(original)
        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = original(*args, **kwargs)
            if logits is not None and self._scheduled is not None and self._packed is None:
                self._packed = self.drafter.pack_rows(logits)  # the first of a pass: later ones are of prompts
            return logits

        model.compute_logits = compute_logits

    def begin_pass(self, runner: Any, scheduled: Any) -> None:
        """Note what a `GPUModelRunner` is going to execute, a `SchedulerOutput`."""
        self._runner, self._packed = runner, None
        for request in set(scheduled.finished_req_ids).intersection(self.drafter.requests):
            self.drafter.end(request)
        now, has_paused = perf_counter(), not scheduled.total_num_scheduled_tokens
        waited = has_paused or scheduled.scheduled_new_reqs  # the last pass may have ended long ago
        if self._last is not None and self._started is not None and not waited:
            self.drafter.observe(*self._last, now - self._started)
        self._scheduled, self._started = (None, None) if has_paused else (scheduled, now)
        self._last = None

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.integer[Any]],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Learn from the pass that was just made, and draft for the next one.

        Args:
            sampled_token_ids: `[B]`, the tokens that each row of the batch got; none in the middle of a prompt.
            num_tokens_no_spec: `[>= B]`, tokens of each row's text, these included.
            token_ids_cpu: `[>= B, max_model_len]`, the texts.
            slot_mappings: not used.

        Returns:
            `[B]` lists of at most `num_speculative_tokens` ids.
        """
        names, scheduled = self._runner.input_batch.req_ids, self._scheduled
        fed = [1 + len(scheduled.scheduled_spec_decode_tokens.get(name, ())) for name in names]
        rows = self._rows(fed)
        emitted, budgets = [row for row, tokens in enumerate(sampled_token_ids) if tokens], list[int]()
        for row in emitted:
            length, new = int(num_tokens_no_spec[row]), len(sampled_token_ids[row])
            budgets.append(max(0, min(self._most, self._longest - length - 1)))
            if self._begin(names[row], token_ids_cpu[row, : length - new]):
                rows[row] = None if rows[row] is None else rows[row][:1]
        requests, tokens = [names[row] for row in emitted], [sampled_token_ids[row] for row in emitted]
        self.drafter.learn_batch(requests, tokens, [rows[row] for row in emitted])
        drafts = [list[int]() for _ in sampled_token_ids]
        for row, draft in zip(emitted, self.drafter.propose(requests, budgets), strict=True):
            drafts[row] = draft.ids
        if sum(fed) == scheduled.total_num_scheduled_tokens:
            self._last = sum(fed), sum(map(len, sampled_token_ids))
        return drafts

    def _rows(self, fed: Sequence[int]) -> list[Any]:
        """Return the rows of logits of each row of the batch, which were copied from the device at once."""
        packed, self._packed = self._packed, None
        if packed is None or len(packed) != sum(fed):  # another rank of tensor parallelism has them
            return [None] * len(fed)
        entries, rows, start = self.drafter.unpack_rows(packed), list[Any](), 0
        for count in fed:
            rows.append(entries[start : start + count])
            start += count
        return rows

    def _begin(self, name: str, before: npt.NDArray[np.int32]) -> bool:
        """Begin a request that is new, or has another text than the one seen before; return True if it begins now."""
        drafter = self.drafter
        if name in drafter:
            known = drafter.text(name)
            if len(known) != len(before) or list(known[-_COMPARED:]) != before[-_COMPARED:].tolist():
                drafter.end(name)
        if name not in drafter:
            drafter.begin(name, before)
            return True
        return False


def _check_version() -> None:
    """Raise unless vLLM is of a version that this was tried with."""
    import vllm

    found = str(vllm.__version__)
    if not f"{found}.".startswith(f"{VERSION}."):
        raise UnsupportedError(
            f"vLLM {found} is not of the version that lade.engines.vllm was tried with ({VERSION}.*)",
            f"install that: pip install 'vllm=={VERSION}.*'",
        )


def _settings(additional: Any) -> Mapping[str, Any]:
    """Return the settings under `lade` of vLLM's `additional_config`."""
    settings = (additional or {}).get("lade", {})
    if not isinstance(settings, dict):
        raise ConfigError("additional_config['lade']", settings, "give an object with memory and price, or neither")
    for name in settings:
        if name not in ("memory", "price"):
            raise ConfigError("additional_config['lade']", name, "unknown setting: give memory or price")
    if not isinstance(settings.get("memory", ""), str):
        raise ConfigError("additional_config['lade']['memory']", settings["memory"], "give the path of a file")
    return settings


def _hook_runner() -> None:
    """Have vLLM's runner say what it executes to the proposer that it owns, if that is one of these; once a process."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original: Callable[..., Any] = GPUModelRunner.execute_model
    if hasattr(original, _HOOKED):
        return

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(proposer := getattr(self, "drafter", None), Proposer):
            proposer.begin_pass(self, scheduler_output)
        return original(self, scheduler_output, *args, **kwargs)

    setattr(execute_model, _HOOKED, True)
    GPUModelRunner.execute_model = execute_model
