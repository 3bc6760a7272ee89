"""Trial passes on the model itself: a small tree, training mode and padding, against plain decoding.

Dropout has many forms: modules, function calls, dropped layers, jitter in a router; and some are active if the module
that holds them is in training mode, whatever the mode of the model as a whole. So names prove nothing: three passes
over two or three tokens are made whenever any module is in training mode. Drawing random numbers is refused even where
no dropout uses them: after fewer passes a sample would come out differently.

Attention over a prompt may be bidirectional, as in PaliGemma, while generated tokens look back only. Then prompts of
several lengths cannot be padded on the right, and need separate passes.

Rows are fed here without their left padding, so the output is exact only if plain decoding ignores the padding in both
positions and masks. Transformers ensures that, unless a class prepares its inputs differently, or has a biased
projection before a convolution: then padded columns enter the first windows.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from lade.backends.encoder_decoder import Encoded, EncoderDecoderRunner
from lade.decoding.tree import ROOT, TokenTree
from lade.model.config import decoder_config, token_embeddings
from lade.model.facts import CACHE, ModelFacts, cache_name
from lade.model.inputs import MaskPlan
from lade.model.kv_cache import TreeCache
from lade.model.randomness import RandomModelError, without_draws
from lade.model.runner import EagerRunner, input_device

logger = logging.getLogger(__name__)

PREFIX_TOKENS, PREFIX_KINDS = 12, 32  # few distinct tokens, as tokens recur in real texts
BRANCHES = ((0, 1, 2), (3, 4, 5), (3, 6))  # indices into random tokens; two of them share a node
FOLLOWING = 7  # index of the token after the second branch
BYSTANDERS = 24  # more children of the root before the branches, which move their slots away from their positions
ENCODER_TOKENS = 16
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}  # in standard deviations of the logits; a wrong mask costs > 0.1
HALF_TOLERANCE = 0.1


@torch.no_grad()
def worst_error(model: PreTrainedModel, plan: MaskPlan, beyond: int = 0) -> float:
    """Return the largest difference between a tree's logits and those of plain decoding along its branches.

    It is in standard deviations of the plain logits. One path is kept and one more token is fed, so that compaction is
    checked too. The prefix is longer than `beyond`, the length of a sliding window or chunk. Raises `RandomModelError`
    if the model draws random numbers.
    """
    logger.info("checking %s, which is not a tested architecture: a tree pass against plain ones", type(model).__name__)
    error = without_draws(lambda: _worst_error(model, plan, PREFIX_TOKENS + beyond))
    logger.debug("the logits of %s differ by %.2g standard deviations at most", type(model).__name__, error)
    return error


def tolerance(model: PreTrainedModel) -> float:
    """Return the largest `worst_error` that rounding explains; recurrent layers compute in float32 in any model."""
    rounded = model.dtype == torch.float64 and ModelFacts.of(model).recurrent
    return TOLERANCE.get(torch.float32 if rounded else model.dtype, HALF_TOLERANCE)


def _worst_error(model: PreTrainedModel, plan: MaskPlan, prefix_length: int) -> float:
    generator = torch.Generator().manual_seed(0)
    vocabulary: int = token_embeddings(model).weight.shape[0]
    distinct: list[int] = torch.randperm(vocabulary, generator=generator).tolist()  # so that branches differ
    kinds = torch.randint(min(PREFIX_KINDS, vocabulary), (prefix_length,), generator=generator)
    prefix = [distinct[kind] for kind in kinds.tolist()]
    branches = [tuple(distinct[i] for i in branch) for branch in BRANCHES]

    encoded, runner = None, EagerRunner(model, plan, model.generation_config)
    if model.config.is_encoder_decoder:
        encoded = Encoded.run(model, torch.tensor([distinct[:ENCODER_TOKENS]], device=input_device(model)))
        runner = EncoderDecoderRunner(model, plan, model.generation_config, encoded)
    cache = runner.tree_cache()
    runner.prefill([prefix[:-1]], cache)
    tree = TokenTree(prefix[-1])
    for path in [*((token,) for token in distinct[FOLLOWING + 1 :][:BYSTANDERS]), *branches]:
        tree.add_path(path, "pool")
    logits = runner.forward([tree], [prefix], cache)[0]  # [S, V]

    plain: dict[tuple[int, ...], PlainDecoding] = {(): PlainDecoding(model, prefix, encoded)}
    errors = [distance(plain[()].logits, logits[ROOT])]
    for path in [branch[:depth] for branch in branches for depth in range(1, len(branch) + 1)]:
        plain[path] = plain.get(path) or plain[path[:-1]].after(path[-1])
        errors.append(distance(plain[path].logits, logits[nodes_of(tree, path)[-1]]))

    kept = branches[1]  # its keys have to be moved
    cache.keep([nodes_of(tree, kept)], fed=len(tree))
    following = distinct[FOLLOWING]
    logits = runner.forward([TokenTree(following)], [[*prefix, *kept, following]], cache)[0]
    errors.append(distance(plain[kept].after(following).logits, logits[ROOT]))
    return max(errors)


def nodes_of(tree: TokenTree, path: Sequence[int]) -> list[int]:
    """Return the nodes of a path, the root first."""
    nodes = [ROOT]
    for token in path:
        node = tree.child(nodes[-1], token)
        assert node is not None
        nodes.append(node)
    return nodes


def distance(plain: torch.Tensor, logits: torch.Tensor) -> float:
    """Return the largest difference of logits `[..., V]` from plain ones, in standard deviations of the latter."""
    plain = plain.to(logits.device)
    if not torch.isfinite(logits).all():
        return float("inf")
    return float((plain - logits).abs().max() / plain.std())


class PlainDecoding:
    """Computes a text as `model.generate` does: the prompt, then token by token, in transformers' own cache.

    The last token of `prefix` is fed separately. In each of several rows the text is the same; `logits`, `[V]`, are
    those of the last row, after the last token, and `prompt_logits` those after all tokens before it.
    """

    def __init__(self, model: PreTrainedModel, prefix: Sequence[int], encoded: Any = None, rows: int = 1) -> None:
        self._model = cast(Any, model)
        self._cache_name = cache_name(model) or CACHE
        self._encoder_arguments = {} if encoded is None else encoded.arguments()
        self._ids = torch.tensor([prefix[:-1]] * rows, device=input_device(model))
        cache: Any = DynamicCache(config=decoder_config(model))
        if encoded is not None:
            cache = EncoderDecoderCache(cache, DynamicCache())
        kwargs = self._kwargs(cache)
        self._take(self._model._prefill(self._ids, model.generation_config, kwargs))
        self.prompt_logits = self.logits
        self._feed(prefix[-1])

    def after(self, token: int) -> PlainDecoding:
        """Return the decoding continued by one token."""
        longer = copy.copy(self)
        longer._cache = copy.deepcopy(self._cache)
        longer._feed(token)
        return longer

    def _feed(self, token: int) -> None:
        self._ids = torch.nn.functional.pad(self._ids, (0, 1), value=token)
        kwargs = self._kwargs(self._cache)
        inputs = self._model.prepare_inputs_for_generation(self._ids, next_sequence_length=1, **kwargs)
        self._take(self._model(**inputs, return_dict=True))

    def _kwargs(self, cache: Any) -> dict[str, Any]:
        """Return the arguments that `model.generate` passes for a text without padding, given `forward`'s signature."""
        kwargs: dict[str, Any] = {self._cache_name: cache, "use_cache": True, **self._encoder_arguments}
        accepted = inspect.signature(self._model.forward).parameters
        if "logits_to_keep" in accepted:
            kwargs["logits_to_keep"] = 1
        if "position_ids" in accepted:
            kwargs["position_ids"] = torch.arange(self._ids.shape[1], device=self._ids.device)[None]
        return kwargs

    def _take(self, output: Any) -> None:
        self._cache: Any = getattr(output, self._cache_name)
        self.logits: torch.Tensor = output.logits[-1, -1]


REMEDY = "call model.eval()"


def training_refusal(facts: ModelFacts) -> str:
    """Return why training mode prevents exact decoding; empty if it does not, or no module is in training mode."""
    if not facts.training:
        return ""
    model: PreTrainedModel = facts.model
    if model.config.is_encoder_decoder:
        return f"it is in training mode, in which encoder-decoders are not checked: {REMEDY}"
    try:
        error = without_draws(lambda: _error_of_cache(model))
    except RandomModelError:
        return f"it is in training mode, where it draws random numbers, as dropout does: {REMEDY}"
    except Exception as problem:  # noqa: BLE001 - any failure of a pass in training mode is the reason
        reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
        return f"it is in training mode, where a pass fails ({reason}): {REMEDY}"
    if not error <= tolerance(model):
        return (
            "it is in training mode, where a pass does not continue from the cache of the one before, "
            f"as with gradient checkpointing: {REMEDY}"
        )
    return ""


@torch.no_grad()
def _error_of_cache(model: Any) -> float:
    """Return the difference between a token fed after two others and the same token fed together with them.

    Recurrent layers may use another function for a lone token, so for them only the content of the cache is compared.
    """
    ids = torch.arange(3, device=input_device(model))[None]
    cache, recurrence = TreeCache(), ModelFacts.of(model).recurrence
    cache.layers += [] if recurrence is None else recurrence.layers()
    kwargs: dict[str, Any] = {cache_name(model) or CACHE: cache, "use_cache": True, "return_dict": True}
    model(input_ids=ids[:, :2], **kwargs)
    last = model(input_ids=ids[:, 2:], **kwargs).logits[0, -1]
    cache.count(1, 3)
    if not all(layer.lengths == [3] for layer in cache.attending):
        return float("inf")
    if recurrence is not None:
        return 0.0 if all(layer.state_bytes for layer in cache.recurrent) else float("inf")
    return distance(model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -1], last)


LENGTHS = 12, 5


@torch.no_grad()
def can_be_padded(model: PreTrainedModel, plan: MaskPlan) -> bool:
    """Return whether prompts may be padded on the right: a padded prompt has the same logits as alone."""
    if model.config.is_encoder_decoder:
        return False  # its decoder prompts are one or two tokens
    runner = EagerRunner(model, replace(plan, pads=True), model.generation_config)
    if not runner.pads:
        return False
    generator = torch.Generator().manual_seed(1)
    vocabulary: int = token_embeddings(model).weight.shape[0]
    prompts = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]
    try:
        logits = runner.prefill(prompts, TreeCache())[-1]
    except Exception as problem:  # noqa: BLE001 - any failure of an unknown model rules padding out
        logger.debug("prompts of %s cannot be padded: %s: %s", type(model).__name__, type(problem).__name__, problem)
        return False
    return distance(runner.prefill(prompts[-1:], TreeCache())[0], logits) <= tolerance(model)


TOKENS, PADDING = 12, 5

_known: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def depends_on_padding(model: PreTrainedModel) -> bool:
    """Return whether left padding changes the output of plain decoding; tried once per model."""
    if model not in _known:
        _known[model] = _error_of_padding(model) > tolerance(model)
    return _known[model]


@torch.no_grad()
def _error_of_padding(model: PreTrainedModel) -> float:
    """Return how much padding changes the logits of two steps, in standard deviations."""
    embeddings: Any = model.get_input_embeddings()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embeddings.weight.shape[0], (1, TOKENS + 1), generator=generator).to(input_device(model))
    alone = _last_two_logits(model, ids, torch.ones_like(ids))
    columns = ids.new_zeros(1, PADDING)
    padded = _last_two_logits(model, torch.cat([columns, ids], 1), torch.cat([columns, torch.ones_like(ids)], 1))
    return distance(alone, padded)


def _last_two_logits(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the logits of the last two tokens, `[2, V]`, of ids `[1, L]`; the last is fed alone, as in `generate`."""
    cache = DynamicCache(config=model.config)
    name = cache_name(model) or CACHE
    kwargs: dict[str, Any] = {"attention_mask": mask[:, :-1], name: cache, "use_cache": True}
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        kwargs["position_ids"] = model._prepare_position_ids_for_generation(ids[:, :-1], kwargs)
    first = model(**model.prepare_inputs_for_generation(ids[:, :-1], is_first_iteration=True, **kwargs))
    kwargs = model._update_model_kwargs_for_generation(first, kwargs, is_encoder_decoder=False)
    second = model(**model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs))
    return torch.stack([output.logits[0, -1] for output in (first, second)])
