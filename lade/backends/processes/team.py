"""Teams of processes that decode one model together: `lade.parallel`, identity checks, calls.

A process with other weights would spoil every text without an error, so this is compared once, before the first call.
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

from lade.backends.processes.channel import NOT_CONNECTED, Channel, connect, generator_states, packed, sendable
from lade.backends.processes.follower import Follower, Plainly
from lade.backends.processes.leader import Leader
from lade.backends.processes.lookahead_parallel import PartRunner
from lade.errors import ClusterError, UnsupportedModelError
from lade.model.config import Positions
from lade.model.facts import ModelFacts, tensor_parallel_size
from lade.model.runner import EagerRunner
from lade.model.support.supports import supports, unwrap
from lade.stats import Step
from lade.version import __version__

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_WEIGHT_FILES = ("*.safetensors", "*.bin")
_OWN_FIELDS = ("_name_or_path", "distributed_config")
"""Fields of a configuration that may differ: each host may have the model in a folder of its own."""


def identity_of(model: PreTrainedModel) -> dict[str, object]:
    """What this process decodes with, by readable names."""
    return {
        "lade's version": __version__,
        "torch's version": torch.__version__,
        "transformers' version": transformers.__version__,
        "the model's class": type(model).__name__,
        "the model's configuration": _of_configuration(model),
        "the model's dtype": str(model.dtype),
        "the model's files": _of_files(model),
        "the model's weights": _of_whole_weights(model),
    }


def check_alike(identities: Sequence[dict[str, object]]) -> None:
    """Raise `ClusterError`, in all processes alike, where they are not the same."""
    for rank, other in enumerate(identities):
        if wrong := [name for name, value in identities[0].items() if other[name] != value]:
            raise ClusterError(
                f"{', '.join(wrong)} of process {rank} and of process 0 differ, and decoding together needs the same: "
                "start all of them with the same versions and the same model"
            )


def _of_configuration(model: PreTrainedModel) -> int:
    fields: dict[str, Any] = model.config.to_dict()
    return zlib.crc32(repr(sorted((k, repr(v)) for k, v in fields.items() if k not in _OWN_FIELDS)).encode())


def _of_files(model: PreTrainedModel) -> object:
    """The commit on the hub; of a folder, sizes of the weight files and bytes here and there in them."""
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


def _of_whole_weights(model: PreTrainedModel) -> int:
    """Of weights that every process has whole, such as those of norms: the first ones of each."""
    from torch.distributed.tensor import DTensor  # takes half a second, and not every build of torch has it

    digest = 0
    for weight in model.parameters():
        if not isinstance(weight, DTensor) and weight.device.type != "meta":
            few = weight.detach().flatten()[:_SAMPLE_BYTES].view(torch.uint8).cpu()
            digest = zlib.crc32(few.numpy().tobytes(), digest)
    return digest


T = TypeVar("T")

logger = logging.getLogger(__name__)


class Team:
    """All processes of a job, each of which has the model or its part of it. Making one is a collective of all.

    Args:
        model: the model.
        parts: whether each has the whole model, and feeds a part of each tree.

    Attributes:
        parts: as given.
        channel: from the first process to the others.
        leader: of the call that is being made, in the first process; None between calls.
    """

    def __init__(self, model: PreTrainedModel, *, parts: bool = False) -> None:
        self.parts = parts
        self.channel = Channel()
        check_alike(self.channel.gather(identity_of(model)))
        self.leader: Leader | None = None
        self.busy = threading.Lock()

    @property
    def leads(self) -> bool:
        """Whether this is the first process."""
        return self.channel.rank == 0


_teams: weakref.WeakKeyDictionary[PreTrainedModel, Team] = weakref.WeakKeyDictionary()


def team_of(model: PreTrainedModel) -> Team | None:
    """The processes that decode a model with this one; None where this one does so alone.

    Raises:
        ClusterError: their models or versions differ; or they are not connected any more.
    """
    team = _teams.get(model)
    if team is None and tensor_parallel_size(model) > 1:
        _check_connected()
        team = _teams[model] = Team(model)
    return team


def share_parts(model: PreTrainedModel) -> None:
    """Have all processes of the job decode this model from now on, each a part of the trees. A collective of all."""
    team = _teams.get(model)
    if team is None or not dist.is_initialized():
        _teams[model] = Team(model, parts=True)


def leader_of(model: PreTrainedModel) -> Leader | None:
    """Of the call that this process makes for all; None if it makes none, or decodes alone."""
    team = _teams.get(model)
    return None if team is None else team.leader


def has_parts(model: PreTrainedModel) -> bool:
    """Whether the processes of this model feed a part of each tree, all of them having the whole model."""
    team = _teams.get(model)
    return team is not None and team.parts


class Call:
    """A call that the first process makes; `end` ends it in all of them.

    Args:
        team: of the model.
        model: the model.

    Raises:
        ClusterError: another call is being made, such as an engine's, or a process has gone.
    """

    def __init__(self, team: Team, model: PreTrainedModel) -> None:
        self._team, self._device = team, model.device
        _check_connected()
        if not team.busy.acquire(blocking=False):
            raise ClusterError(
                "this model's processes take part in another call, such as an open lade.Engine's: wait for its end"
            )
        self._leader = team.leader = Leader(team.channel)
        try:
            with self._leader.passing("join"):
                supports(model)  # the trials of an unknown model are passes of all processes
        except BaseException:
            self._leave()
            raise

    def end(self, result: Any = None, problem: BaseException | None = None) -> None:
        """End it with what it returns or raises. No-op if it has ended."""
        if self._team.leader is not self._leader:
            return
        sent = None if result is None else packed(result)
        told = None if problem is None else sendable(problem)
        try:
            if dist.is_initialized():
                self._leader.tell("end", sent, told, generator_states(self._device))
        finally:
            self._leave()

    def close(self, problem: BaseException | None = None) -> None:
        """End it where nobody is left to whom an error could be raised: what others that have gone miss is logged."""
        try:
            self.end(problem=problem)
        except ClusterError as gone:
            logger.error("%s", gone)

    def _leave(self) -> None:
        self._team.leader = None
        self._team.busy.release()


def led_by_this_process(model: PreTrainedModel) -> Call | None:
    """Begin a call in the first process; None where this one decodes alone.

    Raises:
        UnsupportedModelError: this is one of the others.
    """
    team = team_of(model)
    if team is None:
        return None
    if not team.leads:
        raise UnsupportedModelError(
            f"{type(model).__name__}: process {team.channel.rank} of {team.channel.size} has no requests of its own",
            "call lade.follow(model) in all but the first one",
        )
    return Call(team, model)


def together(model: PreTrainedModel, call: Callable[[], T], plainly: Plainly) -> T:
    """Make a call in the first process, and take part in it in the others; all return what it returns.

    Args:
        model: the model inside any wrapper.
        call: makes it.
        plainly: decodes plainly, for the other processes.
    """
    team = team_of(model)
    if team is None:
        return call()
    if not team.leads:
        result: T = follow_call(team, model, plainly)
        return result
    led = Call(team, model)
    try:
        result = call()
        led.end(result)
    except BaseException as problem:
        led.end(problem=problem)
        raise
    return result


def steps_together(model: PreTrainedModel, begin: Callable[[], Iterator[Step]], plainly: Plainly) -> Iterator[Step]:
    """The same for a stream: in every process an iterator over its steps."""
    team = team_of(model)
    if team is None:
        return begin()
    if not team.leads:
        return _followed(team, model, plainly)
    led = Call(team, model)
    try:
        return LedSteps(begin(), led, team)
    except BaseException as problem:
        led.end(problem=problem)
        raise


def dismiss(model: PreTrainedModel) -> None:
    """Tell the other processes that this one, the first, makes no more calls; those that have gone need not hear it."""
    team = _teams.get(model)
    if team is not None and dist.is_initialized():
        try:
            team.channel.send([("dismiss",)])
        except ClusterError as problem:
            logger.error("%s", problem)


def follow_call(team: Team, model: PreTrainedModel, plainly: Plainly) -> Any:
    """Take part in the next call of the first process; returns what it returns."""
    steps = _steps(team, model, plainly)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _followed(team: Team, model: PreTrainedModel, plainly: Plainly) -> Iterator[Step]:
    steps = _steps(team, model, plainly)
    try:
        for step in steps:  # noqa: UP028 - `yield from` would close it
            yield step
    finally:  # whoever stops reading earlier than the first process still has to make its passes
        for _ in steps:
            pass


def _steps(team: Team, model: PreTrainedModel, plainly: Plainly) -> Generator[Step, None, Any]:
    """The steps of a call. After an error of this process the others cannot go on: all connections are ended."""
    _check_connected()
    follower = Follower(team.channel, model, plainly, PartRunner if team.parts else EagerRunner)
    try:
        return (yield from follower.steps())
    except BaseException as problem:
        if follower.ended:  # the call itself has raised it, in all of them
            raise
        team.channel.disconnect()
        if isinstance(problem, ClusterError) or not isinstance(problem, Exception):
            raise
        raise ClusterError(
            f"a pass of {team.channel.size} processes failed in process {team.channel.rank} "
            f"({type(problem).__name__}: {problem}): start all of them again"
        ) from problem


class LedSteps:
    """The steps of a stream in the first process; the others get them with the next message."""

    def __init__(self, steps: Iterator[Step], led: Call, team: Team) -> None:
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


def _abandon(steps: Iterator[Step], led: Call) -> None:
    """End the call of a stream that nobody reads any more, before Python ends and the connections with it."""
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


ModelT = TypeVar("ModelT")


def parallel(model: ModelT) -> ModelT:
    """Decode a model by all processes of this job together: lookahead parallelism.

    Every process has the whole model, and feeds a part of each token tree. From then on they all call `lade.generate`
    or `lade.stream`, and all return the tokens of plain `model.generate` in one process. The first one may open a
    `lade.Engine`, while the others call `lade.follow(model)`. docs/several-devices.md says where this pays, and where
    splitting the model pays more.

        # torchrun --nproc-per-node 2 script.py
        model = lade.parallel(AutoModelForCausalLM.from_pretrained(name))
        ids = lade.generate(model, input_ids=ids)

    Args:
        model: a transformers causal language model, or one wrapped by PEFT; the same in all processes, each of which
            may have it on a device of its own. If the processes are not connected yet, they are, as torchrun says,
            until Python ends.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: it cannot be served, or not in this way.
        ClusterError: the processes have different models or versions.
    """
    supports(model).require()
    inner = unwrap(model)
    if reason := _why_not(inner):
        raise UnsupportedModelError(
            f"{type(inner).__name__}: {reason}", "decode it in one process, without lade.parallel"
        )
    connect()
    share_parts(inner)
    return model


def _why_not(model: PreTrainedModel) -> str:
    if tensor_parallel_size(model) > 1:
        return "its layers are split over the processes already"
    if model.config.is_encoder_decoder:
        return "it has an encoder, whose states would be needed in each process"
    if ModelFacts.of(model).recurrent:
        return "the states of its recurrent layers would be needed in each process"
    if Positions.of(model.config.get_text_config(decoder=True)).longrope_switch is not None:
        return "at some length it computes its text again"
    return ""
