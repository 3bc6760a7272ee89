"""`lade.invariant` and `lade.variant`: batch-invariant models, so that 16-bit output is bit-exact.

A matrix product over sixteen rows rounds differently from one over a single row, and so does attention when other
tokens are in the pass. So a pass over a tree gives logits that differ from plain decoding's in the last bits, which in
bfloat16 is enough to change the text where two tokens are nearly tied.

>>> lade.invariant(model)       # in place, after a trial
>>> model.generate(**inputs)    # the new reference, which `lade.generate` reproduces exactly
>>> lade.variant(model)         # undo

No weight is changed: rows of linear layers and experts are padded with zeros, packed bfloat16 layers are laid out in
panels if the processor has kernels for these, and attention sums in an order that depends on positions alone. The idea,
batch invariance, is that of Thinking Machines' "Defeating nondeterminism in LLM inference" (2025).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lade.announcements import announced_if_slow
from lade.backends.cpu.invariant import trials
from lade.backends.cpu.invariant.chained_decoder import fuse_decoder
from lade.backends.cpu.invariant.functions import replace_activations, replace_norms
from lade.backends.cpu.invariant.fused import fuse
from lade.backends.cpu.invariant.weights import NAME as EXPERTS
from lade.backends.cpu.invariant.weights import RowPadding, forget_padding, has_mixtures, lay_out, pad_all
from lade.backends.cpu.invariant_marker import ON_GPU, Invariance, changed_modules, invariance_of, set_invariance
from lade.backends.cpu.kernels import DTYPE_CODES, kernel
from lade.backends.trials.backend import LONGEST_PROBE_TOKENS
from lade.errors import UnsupportedModelError
from lade.model.capture_blockers import GIVE_INSIDE, wraps_model
from lade.model.config import decoder_config, dtype_name, field, window_lengths
from lade.model.facts import ModelFacts
from lade.model.inputs import INVARIANT_ATTENTION
from lade.model.module_changes import restore
from lade.model.supports import supports, unwrap
from lade.native import COMPILER_REMEDY

logger = logging.getLogger(__name__)

TEXTS = (5, 61, 190)  # lengths of the trial's texts; with the second one, the tree crosses a tile border
BRIEF_TEXT = 61
"""Length of the only text where a model of the same structure passed before: its tree crosses a tile border."""
BATCHED = 64  # texts up to this length are also tried as one row of a batch
PAST = 3  # tokens by which one more text exceeds each sliding window
REMEDY = "use the model unchanged: in 16-bit, output can diverge where two tokens score almost equally"

_Model = TypeVar("_Model", bound=nn.Module)


class _Record(Invariance):
    """The record on a CPU: it unpickles by importing this module, which registers attention and experts."""


def invariant(model: _Model) -> _Model:
    """Make a model batch-invariant, in place, and return it: a token gets the same bits whatever else is in a pass.

    For inference on the CPU, or on a GPU with Triton for Llama, Mistral, Qwen 2 and 3. From then on `lade.generate`,
    the engine and all other entry points return, in bfloat16, float16 and float32, token for token and score for score
    the output of plain `model.generate` on this model. That output may differ from the model's output before, as with
    any change of the attention kernel.

    The model is tried first: its linear layers, its attention, and then passes over a tree against passes over single
    tokens, for several lengths of text, also past a sliding window of up to 1,024 tokens. An invariant model is tried
    again. On a CPU the result holds for one number of threads: call this again after `torch.set_num_threads`; until
    then the model is decoded plainly.

    On a GPU all products are made of 64 rows each, prompts included: of a long prompt they take longer than before. The
    model's own passes then run kernel by kernel, and `lade.generate` captures them. Adapters and hooks that are added
    to its layers later are not called.

    Combined with `lade.pack`, pack first. No thread may call the model meanwhile.

    Args:
        model: a decoder-only transformers model in evaluation mode, on one device; PEFT wrappers are looked through.

    Raises:
        UnsupportedModelError: the model cannot be made invariant; the message gives the reason, and the first layer
            that differs. The model is left unchanged.
    """
    start, inner = perf_counter(), unwrap(model)
    _check_model(model)
    variant(inner)
    with announced_if_slow(logger, f"trying passes of {type(inner).__name__} that are to be invariant"):
        if inner.device.type == "cpu":
            _make_on_cpu(inner)
        elif problem := ON_GPU.load().make_invariant(inner):
            raise _refused(inner, problem)
    logger.info("%s is invariant, after %.1f s of trials", type(inner).__name__, perf_counter() - start)
    return model


def _make_on_cpu(inner: PreTrainedModel) -> None:
    decoder = inner.get_decoder()
    note = _Record(
        threads=torch.get_num_threads(),
        dtype=inner.dtype,
        modules=sum(1 for _ in inner.modules()),
        attention=decoder.config._attn_implementation,
        experts=decoder.config._experts_implementation if has_mixtures(inner) else None,
    )
    key = trials.key_of(inner)
    known = trials.kept_paddings(key) if key is not None else None
    try:
        set_invariance(inner, note)
        paddings = _replace_layers(inner, decoder, known or (), mixtures=note.experts is not None)
        set_invariance(inner, replace(note, changed=changed_modules(ModelFacts.of(inner))))
        _check_invariance(inner, briefly=known is not None)
    except BaseException:
        variant(inner)
        raise
    if key is not None and known is None:
        trials.keep_paddings(key, paddings)


def variant(model: _Model) -> _Model:
    """Undo `invariant`, in place, and return the model; other models are left alone.

    Raises:
        UnsupportedModelError: hooks were added to a layer meanwhile, by accelerate for example. The model is left
            unchanged.
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
        set_invariance(inner, None)
    return model


def refusal(model: Any) -> str:
    """Return why `invariant` would not even try this model; empty if it would. Nothing is run, the trial may fail."""
    try:
        _check_model(model)
    except UnsupportedModelError as problem:
        return problem.reason
    return ""


def _replace_layers(
    model: PreTrainedModel, decoder: Any, known: Sequence[RowPadding | None], *, mixtures: bool
) -> Sequence[RowPadding | None]:
    """Replace layers and functions of a model by invariant ones, and return the paddings of its products."""
    decoder.set_attn_implementation(INVARIANT_ATTENTION)
    if decoder_config(model)._attn_implementation != INVARIANT_ATTENTION:
        raise _refused(model, "its attention cannot be replaced")
    if mixtures:
        decoder.set_experts_implementation(EXPERTS)
    replace_activations(model)
    replace_norms(model)
    lay_out(model, panels=True)
    paddings = pad_all(model, known)
    fuse(model)
    fuse_decoder(decoder)
    return paddings


def _check_invariance(model: PreTrainedModel, *, briefly: bool) -> None:
    """Raise `UnsupportedModelError` unless passes over trees have the bits of passes over single tokens.

    If a model of this structure passed all trials here before, one of them is enough, in case that anything which is
    not part of the verdict's key has changed.
    """
    config = decoder_config(model)
    heads = _heads(config)
    if heads is not None and not briefly and not trials.attention_keeps_order(heads):
        raise _refused(model, "its attention, as compiled here, does not keep its summation order")
    plan = supports(model).require()
    windows = [window for window in window_lengths(config) if window <= LONGEST_PROBE_TOKENS]
    limit = field(config, "max_position_embeddings") or LONGEST_PROBE_TOKENS
    texts = [BRIEF_TEXT] if briefly else sorted({*TEXTS, *(window + PAST for window in windows)})
    with trials.distinct_layers(model):
        for tokens in texts:
            if tokens + len(TEXTS) * PAST > limit:
                continue
            trial = trials.ModelTrial(model, plan, tokens)
            differing = trial.first_mismatch() or (trial.first_batch_mismatch() if tokens <= BATCHED else None)
            if differing is not None:
                raise _refused(
                    model, f"{differing!r} is the first part that rounds a token differently beside other tokens"
                )


def _check_model(wrapped: Any) -> None:
    """Raise `UnsupportedModelError` for a model that is not even tried."""
    model: Any = unwrap(wrapped)
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        remedy = GIVE_INSIDE if wraps_model(model) else "give a transformers model with generate()"
        raise _refused(model, "it is not a transformers model that generates text", remedy)
    if model.training:
        raise _refused(model, "it is in training mode", "call model.eval()")
    if hasattr(wrapped, "_orig_mod") or ModelFacts.of(model).compiled:
        raise _refused(model, "it is compiled, and compilers choose their own kernels")
    if {tensor.device.type for tensor in model.parameters()} == {"cuda"} and model.dtype in DTYPE_CODES:
        if reason := ON_GPU.load().invariant_refusal(model):
            raise _refused(model, reason)
        return
    elsewhere = sorted({str(tensor.device) for tensor in model.parameters() if tensor.device.type != "cpu"})
    if elsewhere:
        reason = f"it is on {', '.join(elsewhere)}, and only kernels for the CPU keep a fixed order"
        raise _refused(model, reason, 'load it with device_map="cpu", or use it unchanged')
    if any(type(weight.data).__module__.startswith("torch.distributed") for weight in model.parameters()):
        raise _refused(model, "its weights are sharded over processes", "load it whole")
    if model.dtype not in DTYPE_CODES:
        reason = f"it is in {dtype_name(model.dtype)}, not in bfloat16, float16 or float32"
        raise _refused(model, reason, "load it in one of these dtypes, or use it unchanged")
    if reason := _refusal_of_architecture(model):
        raise _refused(model, reason)
    if not kernel("attend").available:
        raise _refused(model, "the compiled kernels are missing", COMPILER_REMEDY)


def _refusal_of_architecture(model: PreTrainedModel) -> str:
    if model.config.is_encoder_decoder:
        return "it has an encoder, whose keys have no positions in the text"
    if ModelFacts.of(model).recurrent:
        return "its recurrent layers sum over the text in an order that depends on how it is split into passes"
    if ModelFacts.of(model).indexers:
        return "its indexers select keys by scores whose rounding varies"
    if not model._can_set_attn_implementation():
        return "its attention does not use transformers' attention interface"
    return ""


def _heads(config: PretrainedConfig) -> trials.Heads | None:
    """Return the numbers and sizes of attention heads; None if the configuration does not give them."""
    many, kv_heads = field(config, "num_attention_heads"), field(config, "num_key_value_heads")
    size = field(config, "head_dim") or (field(config, "hidden_size") // many if isinstance(many, int) else None)
    if not (isinstance(many, int) and isinstance(size, int)):
        return None
    return trials.Heads(many, kv_heads if isinstance(kv_heads, int) else many, size)


def _refused(model: Any, reason: str, remedy: str = REMEDY) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(model).__name__} cannot be made invariant: {reason}", remedy)
