"""Records of a benchmark run (`results.json`), one list element a line.

Everything that is reported can be computed from these records alone; they hold each answer of each method, not means.
Prompts of others are named by a hash of their ids, not quoted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lade.errors import InputError
from lade.files import write_whole

RecordT = TypeVar("RecordT")


def save(path: str | os.PathLike[str], schema: str, record: Any, **more: Any) -> None:
    """Write a record, whole or not at all.

    Args:
        path: the file; its folder must exist.
        schema: its first value, for `load`.
        record: a dataclass of dataclasses, lists, dicts and plain values.
        more: further values of the object, which `load` is to ignore.

    Raises:
        InputError: it cannot be written.
    """
    values = {"schema": schema, **{each.name: getattr(record, each.name) for each in fields(record)}, **more}
    body = b",\n".join(msgspec.json.encode(name) + b": " + _value(value) for name, value in values.items())
    try:
        write_whole(path, b"{\n" + body + b"\n}\n")
    except OSError as problem:
        raise InputError(f"{str(path)!r} cannot be written ({problem}): give another --out") from problem


def load(
    path: str | os.PathLike[str], schema: str, kind: type[RecordT], *, ignored: frozenset[str] = frozenset()
) -> RecordT:
    """Read what `save` wrote; all types are checked.

    Args:
        path: the file.
        schema: that it must be of.
        kind: class of the record.
        ignored: names of values that are none of its fields.

    Raises:
        InputError: it cannot be read, is of another schema, or a field is missing, unknown or of another type.
    """
    try:
        found = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError) as problem:
        raise InputError(f"cannot read {str(path)!r} ({problem}): give another file") from problem
    if not isinstance(found, dict) or found.pop("schema", None) != schema:
        raise InputError(f"{str(path)!r} is not of schema {schema}: run lade bench again, or give another file")
    try:
        return _built(found, kind, ignored)
    except msgspec.ValidationError as problem:
        remedy = "run lade bench again, or give another file"
        raise InputError(f"{str(path)!r} is damaged ({problem}): {remedy}") from problem


def _built(found: Mapping[str, Any], kind: type[RecordT], ignored: frozenset[str]) -> RecordT:
    unknown = found.keys() - {each.name for each in fields(kind)} - ignored  # type: ignore[arg-type]
    if unknown:
        raise msgspec.ValidationError(f"unknown fields {sorted(unknown)}")
    return msgspec.convert(dict(found), kind)


def _value(value: Any) -> bytes:
    if not isinstance(value, list) or not value or isinstance(value[0], str | int | float):
        return msgspec.json.encode(value)
    return b"[\n" + b",\n".join(map(msgspec.json.encode, value)) + b"\n]"


SCHEMA = "lade-bench/1"
"""Changes with every change that a reader of older files could stumble over."""


@dataclass(frozen=True)
class Environment:
    """Hardware and software of a run.

    Attributes:
        device: name of the hardware, such as "AMD EPYC 9654 96-Core Processor, 2 cores".
        threads: of torch.
        versions: of Python and the packages that matter, by name.
        platform: operating system and machine.
        commit: of the project, with "+" after it if files had changed; None outside a checkout.
    """

    device: str
    threads: int
    versions: dict[str, str]
    platform: str
    commit: str | None


@dataclass(frozen=True)
class Model:
    """The model of a run.

    Attributes:
        name: as the user gave it; of a folder the last part.
        kind: transformers' `model_type`.
        parameters: number of them, after inflation.
        dtype: of the weights, such as "bfloat16".
        inflated_from: parameters of the model that computes the same function; None if it is no inflated one.
        draft: name of the model that `hf-assisted` drafts with; None if there is none.
    """

    name: str
    kind: str
    parameters: int
    dtype: str
    inflated_from: int | None = None
    draft: str | None = None


@dataclass(frozen=True)
class Settings:
    """Generation settings, the same for all methods.

    Attributes:
        max_new_tokens: per answer.
        ignore_eos: whether answers continue after the end of the text.
        temperature: None decodes greedily.
        top_k, top_p: as in transformers; None or 0: no limit.
        seeds: one answer of each prompt for each; `[0]` when greedy.
        repeats: how often each answer was timed; its text is compared each time.
    """

    max_new_tokens: int
    ignore_eos: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seeds: list[int] = field(default_factory=lambda: [0])
    repeats: int = 1


@dataclass(frozen=True)
class Workload:
    """Source of the prompts.

    Attributes:
        name: such as "humaneval", or the name of a file.
        format: the loader that read it.
        prompts: how many were run.
        sha256: of the file; None for what is built in.
    """

    name: str
    format: str
    prompts: int
    sha256: str | None = None


@dataclass(frozen=True)
class Method:
    """One way to decode.

    Attributes:
        name: unique in a run, such as "adaptive" or "lookahead 15,5,15".
        kind: hf, hf-prompt-lookup, hf-assisted, hf-mtp, plain, jacobi, prompt-lookup, suffix, token-recycling, mtp,
            lookahead, adaptive, adaptive-warm or drafter.
        config: of the method, such as `{"window": 15, "ngram": 5, "guesses": 15}`.
        packed: whether it ran on prepacked weights (`lade.pack`).
        compared: whether its answers are to equal the reference's. Transformers' assisted methods, when sampling, draw
            from the same distribution but otherwise.
    """

    name: str
    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    compared: bool = True


@dataclass(frozen=True)
class Sample:
    """One answer of one method.

    Attributes:
        workload, prompt, turn: which prompt: the workload's name, the item's id in it, and the turn of a conversation
            from 0. Later turns follow the reference's answers to the earlier ones.
        prompt_sha256: of the ids, as little-endian int64.
        prompt_tokens: how many ids.
        method: its name.
        seed, repeat: which of them.
        new_tokens: tokens of the answer, the one that prefill yields and EOS included.
        seconds: wall-clock time of the call, prefill included.
        prefill_s: until the first token: what `generate` prepares, and prefill.
        decode_s: all later steps; `prefill_s + decode_s` is `seconds`.
        forward_s: the part of `decode_s` spent inside the model's forward pass. On a GPU it means little for
            transformers' own methods: there it ends when the pass has been launched.
        steps: forward passes after prefill; of `hf-assisted` those of the target model.
        step_tokens: tokens fed, the root included; one entry a step. For transformers' own methods as observed.
        accepted: tokens emitted; one entry a step. Their sum is `new_tokens - 1`; less for `hf-prompt-lookup` and
            `hf-assisted`, which check guesses in prefill already.
        sources: for each place in a step (0 is the token after the root), who proposed the tokens emitted there and
            how many: `[{"memory": 80, "bonus": 20}, ...]`; `bonus` for none. The chain of `jacobi` counts as
            `window`. Empty for transformers' own methods.
        distinct_4grams: share of distinct 4-grams in the answer; a text that loops flatters all methods.
        output_sha256: of the new ids, as little-endian int64.
    """

    workload: str
    prompt: str
    turn: int
    prompt_sha256: str
    prompt_tokens: int
    method: str
    seed: int
    repeat: int
    new_tokens: int
    seconds: float
    prefill_s: float
    decode_s: float
    forward_s: float
    steps: int
    step_tokens: list[int]
    accepted: list[int]
    sources: list[dict[str, int]]
    distinct_4grams: float
    output_sha256: str


@dataclass(frozen=True)
class Mismatch:
    """An answer that differs from the reference method's.

    Attributes:
        workload, prompt, turn, method, seed, repeat: of the sample.
        reference: name of the method that it was compared with.
        place: number of the first new token that differs, from 0.
        expected, found: ids there; None where the text had ended.
        expected_score, found_score: their scores when the text up to there is fed to the unpacked model in one pass;
            None where one is missing. Greedily a score is a logit after the processors that the model's
            generation_config asks for. When sampling, transformers draws the token with the largest `p / q`, q being
            exponential noise; the score then is the logit minus `temperature * log q`, with this seed's noise, so that
            the larger score is the one that is drawn. A token that top-k or top-p leaves out has no score, and is
            never called a near tie, although rounding may have moved the limit.
        ulps: how far the scores lie apart, in units in the last place of the larger one in the model's dtype; None
            where one is missing.
        near_tie: whether rounding alone explains it: at most 8 units in bfloat16 and float16, 64 in float32 and
            float64.
    """

    workload: str
    prompt: str
    turn: int
    method: str
    seed: int
    repeat: int
    reference: str
    place: int
    expected: int | None
    found: int | None
    expected_score: float | None
    found_score: float | None
    ulps: float | None
    near_tie: bool


@dataclass(frozen=True)
class StepCurve:
    """Time of a forward pass by the number of tokens fed.

    Attributes:
        packed: on which weights.
        cached: tokens in the cache meanwhile: the median prompt and half an answer.
        sizes: tokens fed, ascending.
        seconds: every pass measured at each size, the model's forward alone, warm-ups left out.
    """

    packed: bool
    cached: int
    sizes: list[int]
    seconds: list[list[float]]


@dataclass
class Results:
    """A run, complete or not.

    Attributes:
        created: ISO 8601, UTC.
        command: the command line.
        complete: whether all samples are there; an interrupted run has fewer.
        reference: name of the method that all outputs are compared with, and speeds are relative to.
    """

    created: str
    command: list[str]
    environment: Environment
    model: Model
    settings: Settings
    workloads: list[Workload]
    methods: list[Method]
    reference: str
    complete: bool = False
    samples: list[Sample] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    step_curves: list[StepCurve] = field(default_factory=list)

    def of(self, method: str, workload: str | None = None) -> Iterator[Sample]:
        """The samples of a method, of one workload or of all."""
        return (s for s in self.samples if s.method == method and workload in (None, s.workload))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, whole or not at all; raises `InputError` where that fails."""
        save(path, SCHEMA, self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Results:
        """Read what `save` wrote.

        Raises:
            InputError: it cannot be read, or is no results file of this schema.
        """
        return load(path, SCHEMA, cls)
