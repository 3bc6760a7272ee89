"""`lade.parallel`: the processes of a job, each with the whole model, share the work of every step."""

from __future__ import annotations

from typing import TypeVar

from transformers import PreTrainedModel

from lade.cluster.channel import connect
from lade.cluster.team import share_parts
from lade.errors import UnsupportedModelError
from lade.model.position_limits import Positions
from lade.model.recurrent.cores import is_recurrent
from lade.model.support.supports import supports, unwrap
from lade.model.tensor_parallel import tensor_parallel_size

ModelT = TypeVar("ModelT")


def parallel(model: ModelT) -> ModelT:
    """Decode a model by all processes of this job together: lookahead parallelism.

    Every process has the whole model, and feeds a part of each token tree; see `lade.cluster.parts`. From then on they
    all call `lade.generate` or `lade.stream`, and all return the tokens of plain `model.generate` in one process. The
    first one may open a `lade.Engine`, while the others call `lade.follow(model)`. Where this pays, and where splitting
    the model pays more, is in docs/several-devices.md.

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
    if is_recurrent(model):
        return "the states of its recurrent layers would be needed in each process"
    if Positions.of(model.config.get_text_config(decoder=True)).longrope_switch is not None:
        return "at some length it computes its text again"
    return ""
