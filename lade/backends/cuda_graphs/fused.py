"""A decoder's pass over trees in ten kernels a layer.

Of few tokens, a layer's matrix products take as long as reading its weights. What stands between them, in torch some
forty kernels, takes nearly as long again. Here it is five:

    x, y = norm(x, before)                          residual and norm
    q, cache = rotate(y @ [q | k | v])              one product, rotary positions, keys and values into the cache
    x, y = norm(x, attention(q, cache) @ o)
    before = gated_product(y @ [gate | up]) @ down

Where a family norms what is added to the residual as well, that is a part of the same kernels.

The weights that one product takes are laid out side by side once, and the model's parameters become views of them: the
model computes as before, and takes no more memory.

A model is fused if its classes are transformers' own of a known family, and if a trial agrees: the first pass of each
shape is made by the model as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from lade.backends.cuda_graphs.buffers import Buffers, StepShape
from lade.backends.cuda_graphs.pass_inputs import StaticInputs
from lade.backends.tree_attention.backend import HAS_TRITON
from lade.locks import ForkSafeLock
from lade.model.facts import ModelFacts
from lade.model.inputs import FULL, TREE_ATTENTION, AttentionSpan, MaskPlan

logger = logging.getLogger(__name__)
_laying_out = ForkSafeLock()

FAMILIES = {name: name.removesuffix("_text") for name in ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")}
"""Names of their modules by model type. Layers differ in biases, norms, windows and the activation alone."""
ACTIVATIONS = "silu", "swish", "gelu_pytorch_tanh"
_OF_TORCH, _LINEAR = frozenset({nn.Embedding, nn.Linear, nn.ModuleList, nn.SiLU}), 7
"""Torch's own kinds of layers in them, and linear ones in each decoder layer."""
ATTENTION = frozenset({"sdpa", TREE_ATTENTION})
WORST = {torch.float32: 1e-2, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest difference of logits, as a share of their norm: twice what bfloat16 showed on 32 random layers, where two
kinds of attention differ by 0.04; in float32 products may be rounded to TF32. A wrong pass is off by about 1."""


def fusion_refusal(facts: ModelFacts, plan: MaskPlan) -> str:
    """Return why passes of a model are not fused; empty if a trial decides."""
    config = facts.text_config
    family = FAMILIES.get(config.model_type)
    if family is None or type(facts.model).__name__.lower() != f"{family}forcausallm":
        return f"its family is none of {', '.join(FAMILIES.values())}"
    own, layers = (f"transformers.models.{family}.", "transformers.activations"), len(facts.model.model.layers)
    strange = [kind.__name__ for kind in facts.kinds if not (kind in _OF_TORCH or _is_invariant_or_of(kind, own))]
    linear = sum(len(modules) for kind, modules in facts.kinds.items() if issubclass(kind, nn.Linear))
    if linear != 1 + _LINEAR * layers:
        strange.append(f"{linear} linear ones in {layers}")
    if strange:
        return f"it has other layers than its family: {', '.join(sorted(strange))}"
    if facts.replaced or facts.compiled or facts.training:
        return "parts of it were replaced, compiled or are in training mode"
    if (activation := activation_of(config)) not in ACTIVATIONS:
        return f"its activation is {activation}, none of {', '.join(ACTIVATIONS)}"
    if getattr(config, "final_logit_softcapping", None) is not None:
        return "it caps its logits"
    if config._attn_implementation not in ATTENTION or plan.additive:
        return f"its attention is {config._attn_implementation}: choose sdpa or {TREE_ATTENTION}"
    dtypes = {weight.dtype for weight in facts.weights}
    if len(dtypes) > 1 or not dtypes <= set(WORST) or {type(weight) for weight in facts.weights} != {nn.Parameter}:
        return "its weights are not all in one of float32, bfloat16 and float16"
    return "" if HAS_TRITON else "Triton is not installed"


def _is_invariant_or_of(kind: type, modules: tuple[str, ...]) -> bool:
    """Return True for a class from these modules, and for one that `lade.invariant` made of any other."""
    return (
        kind.__module__.startswith(modules)
        or kind.__mro__[1].__module__ == "lade.backends.cuda_graphs.invariant.layers"
    )


def activation_of(config: Any) -> str:
    """Return the name of the activation of a configuration's gated blocks."""
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def decoder_of(facts: ModelFacts, plan: MaskPlan, *, in_use: bool) -> FusedDecoder | None:
    """Return the fused form of a model; None if it is refused, or if there is no memory to lay its weights out.

    While the model is `in_use`, captured passes of it may be running, so its weights must stay where they are.
    """
    if fusion_refusal(facts, plan):
        return None
    try:
        with _laying_out, torch.inference_mode(False), torch.no_grad():
            movable = not in_use or all(map(_is_laid_out, facts.model.model.layers))
            return FusedDecoder(facts, plan) if movable else None
    except torch.OutOfMemoryError as problem:  # the layers that are laid out serve the model as well
        logger.info("passes are not fused: %s", problem)
        return None


Added = tuple[torch.Tensor, Any]
"""What is to be added to a residual, `[B, S, H]`, and its `fused_kernels.Norm`; None for none."""


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a decoder layer, those of one product side by side, and the reach of its attention.

    Norms are a `fused_kernels.Norm` each, and None where a family has none.
    """

    qkv: tuple[torch.Tensor, torch.Tensor | None]
    output: tuple[torch.Tensor, torch.Tensor | None]
    gate_up: tuple[torch.Tensor, torch.Tensor | None]
    down: tuple[torch.Tensor, torch.Tensor | None]
    norms: tuple[Any, Any]  # before attention and before the gated block
    added_norms: tuple[Any, Any]  # of what attention and the block add to the residual
    head_norms: tuple[Any, Any] | None  # of queries' and keys' heads
    activation: str  # one of `ACTIVATIONS`
    scaling: float
    span: AttentionSpan

    @classmethod
    def of(cls, layer: Any, span: AttentionSpan) -> LayerWeights:
        """Return a layer of transformers, whose parameters become views of what is side by side."""
        from lade.backends.cuda_graphs.fused_kernels import Norm

        attention, block = layer.self_attn, layer.mlp
        before, after = layer.input_layernorm, layer.post_attention_layernorm
        added_norms: tuple[Norm | None, Norm | None] = None, None
        if hasattr(layer, "pre_feedforward_layernorm"):  # `after` norms what attention adds
            norms = before, layer.pre_feedforward_layernorm
            added_norms = Norm.of(after), Norm.of(layer.post_feedforward_layernorm)
        else:
            norms = before, after
        has_norms = hasattr(attention, "q_norm")
        return cls(
            qkv=side_by_side([attention.q_proj, attention.k_proj, attention.v_proj]),
            output=side_by_side([attention.o_proj]),
            gate_up=side_by_side([block.gate_proj, block.up_proj]),
            down=side_by_side([block.down_proj]),
            norms=(Norm.of(norms[0]), Norm.of(norms[1])),
            added_norms=added_norms,
            head_norms=(Norm.of(attention.q_norm), Norm.of(attention.k_norm)) if has_norms else None,
            activation=activation_of(attention.config),
            scaling=attention.scaling,
            span=span,
        )

    def run(
        self, x: torch.Tensor, before: Added | None, attended: Callable[..., torch.Tensor], product: Any
    ) -> tuple[torch.Tensor, Added]:
        """Return the residual `[B, S, H]`, and what the next layer has to add to it, like this one `before`.

        Args:
            x: residual, `[B, S, H]`.
            before: what is added to it first; None for nothing.
            attended: returns the result of attention, `[B, S, H, D]`, given queries, keys and values side by side.
            product: `torch.nn.functional.linear` or like it.
        """
        from lade.backends.cuda_graphs.fused_kernels import gated_product, norm

        x, y = norm(x, self.norms[0], *(before or ()))
        found = attended(product(y, *self.qkv))
        x, y = norm(x, self.norms[1], product(found.flatten(2), *self.output), self.added_norms[0])
        return x, (product(gated_product(product(y, *self.gate_up), self.activation), *self.down), self.added_norms[1])


class FusedDecoder:
    """Makes the passes over trees of a model that `fusion_refusal` does not refuse."""

    def __init__(self, facts: ModelFacts, plan: MaskPlan) -> None:
        from lade.backends.cuda_graphs import fused_kernels
        from lade.backends.tree_attention import launch

        self._kernels, self._attend = fused_kernels, launch.attend
        config, decoder = facts.text_config, facts.model.model
        self._own_parts = getattr(decoder.layers[0], "parts_of_tree_pass", None)  # of an invariant layer
        self.exact = self._own_parts is not None  # an invariant model's passes must have the bits of its own
        count = config.num_hidden_layers
        kinds = config.layer_types if plan.by_layer_type else list(plan.spans) * count
        spans = [plan.spans[kind] or FULL for kind in kinds[:count]]
        self._layers = [LayerWeights.of(*each) for each in zip(decoder.layers, spans, strict=False)]  # a trial has few
        self._embed, self._rotary, self._head = decoder.embed_tokens, decoder.rotary_emb, facts.model.lm_head
        self._norm = fused_kernels.Norm.of(decoder.norm)
        by_type = hasattr(self._rotary, "layer_types")
        self._rotary_types = (config.layer_types if by_type else [None] * count)[: len(self._layers)]

    def states(self, inputs: StaticInputs, buffers: Buffers, shape: StepShape) -> torch.Tensor:
        """Make a pass, whose keys and values go to the buffers; return the states after the last norm, `[B, S, H]`."""
        slots, rotate, norm = inputs.slots(), self._kernels.rotate_and_store, self._kernels.norm
        product, attention = self._parts(inputs, shape)
        positions = inputs.positions if inputs.offsets is None else inputs.positions + inputs.offsets[0]
        x = self._embed(inputs.ids).detach()
        turns = {kind: self._turns(x, positions, kind) for kind in set(self._rotary_types)}
        before: Added | None = None
        for layer, kind, *cached in zip(self._layers, self._rotary_types, buffers.keys, buffers.values, strict=True):
            keys, values = (each[: shape.rows] for each in cached)

            def attended(
                qkv: torch.Tensor, layer: Any = layer, turns: Any = turns[kind], keys: Any = keys, values: Any = values
            ) -> torch.Tensor:
                query = rotate(qkv, turns, layer.head_norms, keys, values, slots)  # qkv: [B, S, (H + 2 * Hkv) * D]
                return attention(layer, query, keys[:, :, : shape.keys], values[:, :, : shape.keys])

            x, before = layer.run(x, before, attended, product)
        return norm(x, self._norm, *(before or ()))[1]

    def _turns(self, x: torch.Tensor, positions: torch.Tensor, kind: str | None) -> tuple[torch.Tensor, ...]:
        """Return cosines and sines of positions `[B, S]`, `[B, S, D]` each, in layers of a kind."""
        found = self._rotary(x, positions, *([] if kind is None else [kind]))
        return tuple(each.expand(*positions.shape, -1).contiguous() for each in found)

    def _parts(self, inputs: StaticInputs, shape: StepShape) -> tuple[Any, Callable[..., torch.Tensor]]:
        """Return the function of a linear layer, and that of a layer's attention over queries, keys and values."""
        if self._own_parts is not None:
            own: tuple[Any, Callable[..., torch.Tensor]] = self._own_parts(inputs, shape)
            return own
        step = inputs.tree_step(shape.keys)

        def attend(layer: LayerWeights, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return self._attend(query.transpose(1, 2), key, value, step.mask(layer.span), scale=layer.scaling)

        return linear, attend

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of states after the last norm, `[B, S, V]`."""
        found: torch.Tensor = self._head(states)
        return found


def difference(found: torch.Tensor, expected: torch.Tensor, *, exact: bool = False) -> str:
    """Return how logits `[..., V]` of a fused pass differ from the model's own; empty if by rounding alone.

    If they must be `exact`, any difference counts.
    """
    if exact:
        return "" if torch.equal(found, expected) else "their logits are not those of the invariant model, bit for bit"
    expected = expected.float()
    error = ((found.float() - expected).norm() / expected.norm()).item()
    fits = error <= WORST[found.dtype]  # not if it is no number
    return "" if fits else f"their logits differ from its own by {error:.2g} of their norm"


def _is_laid_out(layer: Any) -> bool:
    attention, block = layer.self_attn, layer.mlp
    groups = [attention.q_proj, attention.k_proj, attention.v_proj], [block.gate_proj, block.up_proj]
    return all(_is_joined([each.weight for each in group]) for group in groups)


def side_by_side(layers: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weights of linear layers of the same inputs as one, `[outs, in]`, and their biases, if any, `[outs]`.

    The layers' parameters become views of them.
    """
    has_bias = layers[0].bias is not None
    return _joined([each.weight for each in layers]), _joined([each.bias for each in layers]) if has_bias else None


def _joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    first, sizes = parameters[0].detach(), [len(each) for each in parameters]
    if _is_joined(parameters):
        return first.as_strided((sum(sizes), *first.shape[1:]), first.stride())
    whole = torch.cat([each.detach() for each in parameters])
    for parameter, part in zip(parameters, whole.split(sizes), strict=True):
        parameter.data = part
    return whole


def _is_joined(parameters: Sequence[torch.Tensor]) -> bool:
    """Return True if parameters follow each other in one block of memory."""
    block, place = parameters[0].untyped_storage().data_ptr(), parameters[0].data_ptr()
    for each in parameters:
        if each.untyped_storage().data_ptr() != block or each.data_ptr() != place or not each.is_contiguous():
            return False
        place += each.nbytes
    return True
