"""`lade.invariant` and `lade.variant`: batch-invariant models, so that 16-bit output is bit-exact.

A matrix product over sixteen rows rounds otherwise than one over a single row, and attention otherwise where other
tokens stand beside a token. So a pass over a tree gives scores that differ from plain decoding's in their last places,
which in bfloat16 is enough to part the texts where two tokens are nearly equally likely.

>>> lade.invariant(model)       # in place, after a trial
>>> model.generate(**inputs)    # is the reference from now on, and `lade.generate` returns just that
>>> lade.variant(model)         # as it was

No weight is changed: linear layers get rows of zeros beside a lone row, experts likewise, packed ones in bfloat16 lie
in another order meanwhile where the processor has tiles, and attention sums in an order that depends on positions
alone. The idea is of Thinking Machines' "Defeating nondeterminism
in LLM inference" (2025), which calls it batch invariance.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lade.backends.cpu.invariant.activations import compose_activations
from lade.backends.cpu.invariant.attention import NAME as ATTENTION
from lade.backends.cpu.invariant.norms import compile_norms
from lade.backends.cpu.invariant.padded_rows import forget_padding
from lade.backends.cpu.invariant.trials import Heads, ModelTrial, attention_keeps_order
from lade.backends.cpu.invariant.weights import NAME as EXPERTS
from lade.backends.cpu.invariant.weights import has_mixtures, lay_out, pad_all
from lade.backends.cpu.invariant_marker import Invariance, changed_modules, invariance_of, note_invariance
from lade.errors import UnsupportedModelError
from lade.model.capture_blockers import GIVE_INSIDE, wraps_model
from lade.model.config import decoder_config, dtype_name, field, window_lengths
from lade.model.facts import ModelFacts
from lade.model.in_place_subclassing import restore
from lade.model.support.supports import LONGEST_PROBE_TOKENS, supports, unwrap

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TEXTS = (5, 61, 190)
"""Lengths of the texts of the trial; behind the second one the tree crosses the border of a tile."""
BATCHED = 64
"""Up to this length a text is tried as one row of several, too."""
PAST = 3
"""How many tokens longer than a sliding window one more text is."""
REMEDY = "use it as it is, where texts are those of plain decoding up to near ties"

_Model = TypeVar("_Model", bound=nn.Module)


def invariant(model: _Model) -> _Model:
    """Have a model give each token the same bits whatever else is in a pass, in place. For inference on the CPU.

    From then on `lade.generate`, the engine and all else return, in bfloat16, float16 and float32, token for token and
    score for score what plain `model.generate` on this model returns. Its texts may part from those before, as they do
    with another attention kernel.

    The model is tried before anything is promised: its linear layers, its attention, and then a pass over a tree
    against passes over single tokens, for several lengths of text, also past a sliding window of up to 1,024 tokens. A
    model that is invariant already is tried again. That is for one number of threads: after `torch.set_num_threads`
    call this again; until then the model is decoded plainly.

    With `lade.pack`, pack first. While this runs no thread may call the model.

    Args:
        model: a decoder-only transformers model in evaluation mode, on the CPU; one wrapped by PEFT is looked into.

    Returns:
        The model itself.

    Raises:
        UnsupportedModelError: it cannot be made invariant; the message says why, and names the first layer that
            differs. The model is then as it was.
    """
    start, inner = perf_counter(), unwrap(model)
    _check_model(inner, compiled=hasattr(model, "_orig_mod"))
    variant(inner)
    decoder = inner.get_decoder()
    note = Invariance(
        threads=torch.get_num_threads(),
        dtype=inner.dtype,
        modules=sum(1 for _ in inner.modules()),
        attention=decoder.config._attn_implementation,
        experts=decoder.config._experts_implementation if has_mixtures(inner) else None,
    )
    try:
        note_invariance(inner, note)
        _change(inner, decoder, mixtures=note.experts is not None)
        note_invariance(inner, replace(note, changed=changed_modules(ModelFacts.of(inner))))
        _try(inner)
    except BaseException:
        variant(inner)
        raise
    logger.info("%s is invariant, after %.1f s of trials", type(inner).__name__, perf_counter() - start)
    return model


def variant(model: _Model) -> _Model:
    """Undo `invariant`, in place; a model that is not invariant is left alone.

    Args:
        model: the model.

    Returns:
        The model itself.

    Raises:
        UnsupportedModelError: a layer was given hooks since, by accelerate for instance. The model is then as it was.
    """
    inner = unwrap(model)
    note = invariance_of(inner) if isinstance(inner, nn.Module) else None
    if note is not None:
        restore(inner)
        forget_padding(inner)
        lay_out(inner, panels=False)
        decoder = inner.get_decoder()
        decoder.set_attn_implementation(note.attention)
        if note.experts is not None:
            decoder.set_experts_implementation(note.experts)
        note_invariance(inner, None)
    return model


def can_be_tried(model: Any) -> bool:
    """Whether `invariant` tries this model, as it is and where it is. Nothing is run: the trial may still fail."""
    try:
        _check_model(unwrap(model), compiled=hasattr(model, "_orig_mod"))
    except UnsupportedModelError:
        return False
    return True


def _change(model: PreTrainedModel, decoder: Any, *, mixtures: bool) -> None:
    decoder.set_attn_implementation(ATTENTION)
    if decoder_config(model)._attn_implementation != ATTENTION:
        raise UnsupportedModelError(_says(model, "its attention cannot be replaced"), REMEDY)
    if mixtures:
        decoder.set_experts_implementation(EXPERTS)
    compose_activations(model)
    compile_norms(model)
    lay_out(model, panels=True)
    pad_all(model, model.dtype)


def _try(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` unless passes over trees have the bits of passes over single tokens."""
    config = decoder_config(model)
    heads = _heads(config)
    if heads is not None and not attention_keeps_order(heads):
        reason = "its attention, as compiled here, does not keep its order of summation"
        raise UnsupportedModelError(_says(model, reason), REMEDY)
    plan = supports(model).require()
    windows = [window for window in window_lengths(config) if window <= LONGEST_PROBE_TOKENS]
    limit = field(config, "max_position_embeddings") or LONGEST_PROBE_TOKENS
    for tokens in sorted({*TEXTS, *(window + PAST for window in windows)}):
        if tokens + len(TEXTS) * PAST > limit:
            continue
        trial = ModelTrial(model, plan, tokens)
        differing = trial.differing() or (trial.differing_in_a_batch() if tokens <= BATCHED else None)
        if differing is not None:
            raise UnsupportedModelError(
                _says(
                    model, f"{differing!r} is the first part of it that gives a token other bits beside other tokens"
                ),
                REMEDY,
            )


def _check_model(model: Any, *, compiled: bool) -> None:
    """Raise `UnsupportedModelError` for a model that is not to be touched at all; `compiled`: by a wrapper."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        remedy = GIVE_INSIDE if wraps_model(model) else "give one that does"
        raise UnsupportedModelError(_says(model, "it is no transformers model that generates"), remedy)
    if model.training:
        raise UnsupportedModelError(_says(model, "it is in training mode"), "call model.eval()")
    if compiled or ModelFacts.of(model).compiled:
        raise UnsupportedModelError(_says(model, "it is compiled, and compilers choose kernels anew"), REMEDY)
    elsewhere = sorted({str(tensor.device) for tensor in model.parameters() if tensor.device.type != "cpu"})
    if elsewhere:
        reason = f"it lies on {', '.join(elsewhere)}, and only on the CPU are its kernels known to keep an order"
        raise UnsupportedModelError(_says(model, reason), 'load it with device_map="cpu", or use it as it is')
    if any(type(weight.data).__module__.startswith("torch.distributed") for weight in model.parameters()):
        raise UnsupportedModelError(_says(model, "its weights are sharded over processes"), "load it whole")
    if model.dtype not in DTYPES:
        reason = f"it is in {dtype_name(model.dtype)}, and this is for bfloat16, float16 and float32"
        raise UnsupportedModelError(_says(model, reason), "load it in one of these, or use it as it is")
    if reason := _refusal_of_architecture(model):
        raise UnsupportedModelError(_says(model, reason), REMEDY)


def _refusal_of_architecture(model: PreTrainedModel) -> str:
    if model.config.is_encoder_decoder:
        return "it has an encoder, whose keys have no positions in the text"
    if ModelFacts.of(model).recurrent:
        return "its recurrent layers sum over the text in an order that depends on how it is cut"
    if ModelFacts.of(model).indexers:
        return "its indexers pick keys by scores that are rounded as it comes"
    if not model._can_set_attn_implementation():
        return "its attention does not go through transformers' interface"
    return ""


def _heads(config: PretrainedConfig) -> Heads | None:
    """The heads of the layers; None where these differ, or do not say."""
    many, kv_heads = field(config, "num_attention_heads"), field(config, "num_key_value_heads")
    size = field(config, "head_dim") or (field(config, "hidden_size") // many if isinstance(many, int) else None)
    if not (isinstance(many, int) and isinstance(size, int)):
        return None
    return Heads(many, kv_heads if isinstance(kv_heads, int) else many, size, size)


def _says(model: Any, reason: str) -> str:
    return f"{type(model).__name__} cannot be made invariant: {reason}"
