"""Work of the commands that prepare later generations: `lade pack` and `lade warm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from lade.backends.cpu.packing import folder, quality
from lade.backends.cpu.packing import pack as packing
from lade.backends.cpu.packing.integers import Int8Linear
from lade.backends.cpu.packing.quality import LayerError
from lade.cli.encoder import Encoder
from lade.cli.loading.load import LoadedModel
from lade.cli.prompts import Prompt
from lade.cli.run import Interrupt, decode
from lade.cli.terminal import Progress, Terminal, count
from lade.config import LookaheadConfig
from lade.errors import ConfigError, InputError
from lade.memory import Memory
from lade.stats import Stats

LONGEST_WINDOW = 1024


@dataclass(frozen=True)
class Packing:
    """A model to be packed.

    Args:
        loaded: model and tokenizer; the model is packed in place.
        weights: integer format of the weights, "int8" or "int4".
        keep: patterns of layer names that keep their dtype.
        save: folder to write, or None.
    """

    loaded: LoadedModel
    weights: str
    keep: Sequence[str]
    save: Path | None

    def run(self, ids: list[int], term: Terminal) -> tuple[dict[str, Any], list[LayerError]]:
        """Pack the model; return the fields that `--json` prints, and the errors of layers.

        Args:
            ids: text to compare on; empty for no comparison.
            term: terminal that shows the progress.

        Raises:
            ConfigError: `keep` leaves no layer to round.
            InputError: no layer is large enough, or the folder cannot be written.
        """
        loaded, model = self.loaded, self.loaded.model
        errors: list[LayerError] = []
        facts: dict[str, Any] = {"model": loaded.name, "dtype": loaded.dtype, "weights": self.weights}
        before, window = _bytes(model), min(LONGEST_WINDOW, loaded.context or LONGEST_WINDOW)
        self._check()
        if ids:
            term.show_status("reading the text with the model as it is")
            before_packing = quality.perplexity(model, ids, window)
            facts |= {"tokens": len(ids), "window": window, "perplexity_before": before_packing}
        term.show_status("packing the weights")
        packing.pack(model, keep_original=bool(ids), weights=self.weights, keep=self.keep)
        if ids:
            term.show_status(f"reading the text in {self.weights}")
            with quality.watched(model) as errors:
                facts["perplexity_after"] = quality.perplexity(model, ids, window)
        facts |= {"int8_layers": packing.int8_layers(model), "int4_layers": packing.int4_layers(model)}
        facts |= {"kept_layers": packing.kept_layers(model)}
        facts |= {"bytes_before": before, "bytes_after": _bytes(model), "saved": None}
        if self.save is not None:
            term.show_status("writing the model")
            folder.save_packed(model, self.save, loaded.tokenizer)
            facts["saved"] = str(self.save)
        return facts, errors

    def _check(self) -> None:
        """Check what would otherwise fail at the end."""
        kinds = packing.packable(self.loaded.model, weights=self.weights, keep=self.keep)
        small = f"linear layers below {packing.MIN_WEIGHTS:,} weights keep their dtype"
        if not kinds:
            raise InputError(f"nothing to round to {self.weights}: {small}; give a larger model")
        if not any(issubclass(kind, Int8Linear) for kind in kinds.values()):
            raise ConfigError("keep", ",".join(self.keep), f"no layer is left to round: {small}")
        if self.save is not None:
            folder.check_target(self.save)


def encode_text(loaded: LoadedModel, text: str, path: Path, tokens: int) -> list[int]:
    """Return the first ids of a text; raises `InputError`, naming its file, for fewer than two."""
    ids: list[int] = loaded.tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"][:tokens]
    if len(ids) < 2:
        raise InputError(f"the text {str(path)!r} has {count(len(ids), 'token')}: give a longer one")
    return ids


def _bytes(model: Any) -> int:
    """Return the bytes of all weights, for int8 and int4 layers those of the integers even if the original is kept."""
    in_integers = [module for module in model.modules() if isinstance(module, Int8Linear)]
    own = {id(module.weight) for module in in_integers} - packing.shared_weights(model)
    dense: int = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in own)
    return dense + sum(module.nbytes for module in in_integers)


SAVE_EVERY_S = 60.0


@dataclass
class WarmResult:
    """Result of filling a memory.

    Attributes:
        runs: statistics of each answer.
        skipped: names of unusable prompts, with the reasons.
        interrupted: Ctrl-C ended the run.
    """

    runs: list[Stats] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    interrupted: bool = False

    @property
    def new_tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(run.new_tokens for run in self.runs)

    @property
    def rate(self) -> float:
        """Tokens per step over all prompts."""
        return _rate(self.runs)

    @property
    def first_tenth(self) -> float:
        """Tokens per step of the first tenth of the prompts, of one at least."""
        return _rate(self.runs[: self._tenth])

    @property
    def last_tenth(self) -> float:
        """Tokens per step of the last tenth of the prompts, of one at least."""
        return _rate(self.runs[-self._tenth :])

    @property
    def _tenth(self) -> int:
        return max(1, len(self.runs) // 10)


def _rate(runs: list[Stats]) -> float:
    steps = sum(run.steps for run in runs)
    return sum(run.accepted_tokens for run in runs) / steps if steps else 0.0


def fill_memory(
    memory: Memory,
    encode: Encoder,
    loaded: LoadedModel,
    prompts: list[tuple[str, Prompt]],
    max_new_tokens: int,
    save: Callable[[], None],
    term: Terminal,
) -> WarmResult:
    """Fill a memory from a model's answers, one prompt after the other.

    Args:
        memory: draft memory to fill.
        encode: encoder of the prompts.
        loaded: model and tokenizer.
        prompts: prompts with their names for messages.
        max_new_tokens: token limit of each answer.
        save: saves the memory; called every minute, at the end, and after Ctrl-C.
        term: terminal that shows the progress.
    """
    result, saved_at = WarmResult(), perf_counter()
    config = LookaheadConfig(memory=memory)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Interrupt() as interrupt:  # between generations, which have their own
        with Progress(*columns, console=term.err, transient=True, disable=not term.animated) as progress:
            task = progress.add_task("prompts", total=len(prompts))
            for done, (name, prompt) in enumerate(prompts, start=1):
                try:
                    ids = encode(prompt)
                except InputError as problem:
                    term.say(f"skipped: {name}: {problem}", "yellow")
                    result.skipped.append((name, str(problem)))
                else:
                    room = loaded.room(ids, max_new_tokens, within=True)
                    run = decode(
                        loaded, ids, lookahead=config, max_new_tokens=room, term=term, on_step=lambda step: None
                    )
                    result.runs.append(run.stats)
                    result.interrupted = run.interrupted
                rate = f"prompts · {result.rate:.2f} tokens per step"
                progress.update(task, completed=done, description=rate)
                term.tell_progress(f"{done} of {len(prompts)} {rate}")
                if perf_counter() - saved_at > SAVE_EVERY_S:
                    save()
                    saved_at = perf_counter()
                result.interrupted |= interrupt.requested
                if result.interrupted:
                    break
        if result.runs:  # an empty memory must not replace a good one
            save()
        result.interrupted |= interrupt.requested
    return result
