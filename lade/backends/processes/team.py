"""Teams of processes that decode one model together: `lade.parallel`, identity checks, and calls.

A process with other weights would corrupt every text without an error, so weights are compared once, before the first
call.
"""

from __future__ import annotations

import logging
import threading
import weakref
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import distributed as dist
from transformers import PreTrainedModel

from lade.backends.processes.follower import Follower, PlainDecode
from lade.backends.processes.leader import NOT_CONNECTED, Channel, Leader, connect, generator_states, packed, sendable
from lade.backends.processes.lookahead_parallel import PartRunner
from lade.errors import ClusterError, UnsupportedModelError
from lade.model.config import Positions
from lade.model.facts import ModelFacts, tensor_parallel_size
from lade.model.runner import EagerRunner
from lade.model.supports import supports, unwrap
from lade.stats import Step
from lade.version import __version__

logger = logging.getLogger(__name__)
T = TypeVar("T")
ModelT = TypeVar("ModelT")
_OWN_FIELDS = ("_name_or_path", "distributed_config")
"""Configuration fields that may differ between hosts, such as the folder of the model."""
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_WEIGHT_FILES = ("*.safetensors", "*.bin")
_teams: weakref.WeakKeyDictionary[PreTrainedModel, Team] = weakref.WeakKeyDictionary()


def parallel(model: ModelT) -> ModelT:
    """Decode a model by all processes of this job together: lookahead parallelism.

    Every process has the whole model, and feeds a part of each token tree. From then on all of them call
    `lade.generate` or `lade.stream`, and all return the tokens of plain `model.generate` in one process. Instead, the
    first one may open a `lade.Engine`, while the others call `lade.follow(model)`. docs/several-devices.md tells where
    this pays, and where splitting the model pays more.

        # torchrun --nproc-per-node 2 script.py
        model = lade.parallel(AutoModelForCausalLM.from_pretrained(name))
        ids = lade.generate(model, input_ids=ids)

    Args:
        model: a transformers causal language model, or one wrapped by PEFT; the same in all processes, each of which
            may have it on its own device. Processes that are not connected yet are connected as torchrun configures it.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: the model cannot be served, or not by several processes.
        ClusterError: models or versions differ between processes.
    """
    supports(model).require()
    inner = unwrap(model)
    if reason := _refusal(inner):
        raise UnsupportedModelError(
            f"{type(inner).__name__}: {reason}", "decode it in one process, without lade.parallel"
        )
    connect()
    share_parts(inner)
    return model


def _refusal(model: PreTrainedModel) -> str:
    if tensor_parallel_size(model) > 1:
        return "its layers are already split over the processes"
    if model.config.is_encoder_decoder:
        return "it has an encoder, whose output every process would need"
    if ModelFacts.of(model).recurrent:
        return "it has recurrent layers, whose states every process would need"
    if Positions.of(model.config.get_text_config(decoder=True)).longrope_switch is not None:
        return "it recomputes its text at some length"
    return ""


class Team:
    """All processes of a job, each with the model or its part of it. Creating one is a collective operation."""

    def __init__(self, model: PreTrainedModel, *, parts: bool = False) -> None:
        self.parts = parts  # true if each process has the whole model and feeds a part of each tree
        self.channel = Channel()
        self.leads = self.channel.rank == 0
        check_identical(self.channel.gather(identity_of(model)))
        self.leader: Leader | None = None  # of the present call; None between calls, and in followers
        self.busy = threading.Lock()


def team_of(model: PreTrainedModel) -> Team | None:
    """Return the team of processes that decode a model; None if this process decodes it alone.

    Raises:
        ClusterError: models or versions differ between processes, or the processes are no longer connected.
    """
    team = _teams.get(model)
    if team is None and tensor_parallel_size(model) > 1:
        _check_connected()
        team = _teams[model] = Team(model)
    return team


def share_parts(model: PreTrainedModel) -> None:
    """Let all processes of the job decode this model from now on, each a part of the trees. A collective operation."""
    team = _teams.get(model)
    if team is None or not dist.is_initialized():
        _teams[model] = Team(model, parts=True)


def leader_of(model: PreTrainedModel) -> Leader | None:
    """Return the `Leader` of the present call; None outside of calls, in followers, and without a team."""
    team = _teams.get(model)
    return None if team is None else team.leader


def has_team(model: PreTrainedModel) -> bool:
    """Return True if several processes are known to decode this model."""
    return model in _teams


def has_parts(model: PreTrainedModel) -> bool:
    """Return True if the processes of this model have the whole model each, and feed a part of each tree."""
    team = _teams.get(model)
    return team is not None and team.parts


class LedCall:
    """A call that the leader makes; `end` ends it in all processes.

    Raises:
        ClusterError: another call is in progress, such as that of an open engine, or a process has exited.
    """

    def __init__(self, team: Team, model: PreTrainedModel) -> None:
        self._team, self._device = team, model.device
        _check_connected()
        if not team.busy.acquire(blocking=False):
            raise ClusterError(
                "this model's processes are busy with another call, such as an open lade.Engine: wait until it ends"
            )
        self._leader = team.leader = Leader(team.channel)
        try:
            with self._leader.announced("join"):
                supports(model)  # trials of an unknown model run in all processes
        except BaseException:
            self._leave()
            raise

    def end(self, result: Any = None, problem: BaseException | None = None) -> None:
        """End the call with its result or error. A no-op if it has ended."""
        if self._team.leader is not self._leader:
            return
        sent = None if result is None else packed(result)
        told = None if problem is None else sendable(problem)
        try:
            if dist.is_initialized():
                self._leader.send("end", sent, told, generator_states(self._device))
        finally:
            self._leave()

    def close(self, problem: BaseException | None = None) -> None:
        """End the call where nobody can handle an error: failures to reach the followers are logged."""
        try:
            self.end(problem=problem)
        except ClusterError as gone:
            logger.error("%s", gone)

    def _leave(self) -> None:
        self._team.leader = None
        self._team.busy.release()


def led_by_this_process(model: PreTrainedModel) -> LedCall | None:
    """Begin a call in the leader; return None if this process decodes alone.

    Raises:
        UnsupportedModelError: this process is a follower.
    """
    team = team_of(model)
    if team is None:
        return None
    if not team.leads:
        raise UnsupportedModelError(
            f"{type(model).__name__}: process {team.channel.rank} of {team.channel.size} makes no calls of its own",
            "call lade.follow(model) in all processes but the first",
        )
    return LedCall(team, model)


def together(model: PreTrainedModel, call: Callable[[], T], plain_decode: PlainDecode) -> T:
    """Make a call in the leader, and follow it in the other processes; all return its result."""
    team = team_of(model)
    if team is None:
        return call()
    if not team.leads:
        result: T = follow_call(team, model, plain_decode)
        return result
    led = LedCall(team, model)
    try:
        result = call()
        led.end(result)
    except BaseException as problem:
        led.end(problem=problem)
        raise
    return result


def steps_together(
    model: PreTrainedModel, begin: Callable[[], Iterator[Step]], plain_decode: PlainDecode
) -> Iterator[Step]:
    """Make a streamed call as `together` does; return an iterator over its steps in every process."""
    team = team_of(model)
    if team is None:
        return begin()
    if not team.leads:
        return _followed(team, model, plain_decode)
    led = LedCall(team, model)
    try:
        return LedSteps(begin(), led, team)
    except BaseException as problem:
        led.end(problem=problem)
        raise


class LedSteps:
    """Steps of a stream in the leader; followers get them with the next message."""

    def __init__(self, steps: Iterator[Step], led: LedCall, team: Team) -> None:
        self._steps, self._led, self._leader = steps, led, team.leader
        self._abandoned = weakref.finalize(self, _abandon, steps, led)

    def __iter__(self) -> LedSteps:
        return self

    def __next__(self) -> Step:
        try:
            step = next(self._steps)
        except StopIteration:
            self._led.end()
            raise
        except BaseException as problem:
            self._led.end(problem=problem)
            raise
        assert self._leader is not None
        self._leader.defer("step", step)
        return step

    def close(self) -> None:
        """Stop early, in all processes."""
        self._abandoned.detach()
        try:
            _close(self._steps)
        finally:
            self._led.end()


def dismiss(model: PreTrainedModel) -> None:
    """Tell the followers that the leader makes no more calls; processes that have exited are ignored."""
    team = _teams.get(model)
    if team is not None and dist.is_initialized():
        try:
            team.channel.send([("dismiss",)])
        except ClusterError as problem:
            logger.error("%s", problem)


def follow_call(team: Team, model: PreTrainedModel, plain_decode: PlainDecode) -> Any:
    """Follow the next call of the leader, and return its result."""
    steps = _steps(team, model, plain_decode)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _followed(team: Team, model: PreTrainedModel, plain_decode: PlainDecode) -> Iterator[Step]:
    steps = _steps(team, model, plain_decode)
    try:
        for step in steps:  # noqa: UP028 - `yield from` would close it
            yield step
    finally:  # a follower that stops reading early must still run the leader's passes
        for _ in steps:
            pass


def _steps(team: Team, model: PreTrainedModel, plain_decode: PlainDecode) -> Generator[Step, None, Any]:
    """Yield the steps of a call. If this process fails the others cannot go on, so all connections are closed."""
    _check_connected()
    follower = Follower(team.channel, model, plain_decode, PartRunner if team.parts else EagerRunner)
    try:
        return (yield from follower.steps())
    except BaseException as problem:
        if follower.ended:  # the call itself raised it, in all processes
            raise
        team.channel.disconnect()
        if isinstance(problem, ClusterError) or not isinstance(problem, Exception):
            raise
        raise ClusterError(
            f"a pass of {team.channel.size} processes failed in process {team.channel.rank} "
            f"({type(problem).__name__}: {problem}): restart all of them"
        ) from problem


def _abandon(steps: Iterator[Step], led: LedCall) -> None:
    """End the call of a stream that was garbage collected, or is open at interpreter exit."""
    try:
        _close(steps)
    finally:
        led.close()


def _close(steps: Iterator[Step]) -> None:
    if (close := getattr(steps, "close", None)) is not None:
        close()


def _check_connected() -> None:
    if not dist.is_initialized():
        raise ClusterError(NOT_CONNECTED)


def identity_of(model: PreTrainedModel) -> dict[str, object]:
    """Return what must be equal in all processes, by readable names."""
    return {
        "lade's version": __version__,
        "torch's version": torch.__version__,
        "transformers' version": transformers.__version__,
        "the model's class": type(model).__name__,
        "the model's configuration": _config_digest(model),
        "the model's dtype": str(model.dtype),
        "the model's files": _files_identity(model),
        "the model's weights": _weights_digest(model),
    }


def check_identical(identities: Sequence[dict[str, object]]) -> None:
    """Raise `ClusterError`, in all processes alike, if their identities differ."""
    for rank, other in enumerate(identities):
        if wrong := [name for name, value in identities[0].items() if other[name] != value]:
            raise ClusterError(
                f"{', '.join(wrong)} differ between process {rank} and process 0, which decode together: "
                "start all of them with the same versions and the same model"
            )


def _config_digest(model: PreTrainedModel) -> int:
    fields: dict[str, Any] = model.config.to_dict()
    return zlib.crc32(repr(sorted((k, repr(v)) for k, v in fields.items() if k not in _OWN_FIELDS)).encode())


def _files_identity(model: PreTrainedModel) -> object:
    """Return the commit on the hub, or the sizes and sampled contents of the weight files in a folder."""
    folder = Path(str(getattr(model.config, "_name_or_path", "")))
    if not folder.is_dir():
        return getattr(model.config, "_commit_hash", None)
    files = sorted(file for pattern in _WEIGHT_FILES for file in folder.glob(pattern))
    return [(file.name, file.stat().st_size, _sampled(file)) for file in files]


def _sampled(file: Path) -> int:
    size, digest = file.stat().st_size, 0
    with file.open("rb") as opened:
        for number in range(_SAMPLES):
            opened.seek(size * number // _SAMPLES)
            digest = zlib.crc32(opened.read(_SAMPLE_BYTES), digest)
    return digest


def _weights_digest(model: PreTrainedModel) -> int:
    """Return a checksum of weights that are not split, such as those of norms, over the first elements of each."""
    from torch.distributed.tensor import DTensor  # slow to import, and missing in some builds of torch

    digest = 0
    for weight in model.parameters():
        if not isinstance(weight, DTensor) and weight.device.type != "meta":
            few = weight.detach().flatten()[:_SAMPLE_BYTES].view(torch.uint8).cpu()
            digest = zlib.crc32(few.numpy().tobytes(), digest)
    return digest
