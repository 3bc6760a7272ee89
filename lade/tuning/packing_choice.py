"""Whether to pack a model's weights: what passes take is measured both ways, and the faster way stays.

The curves are those that drafting goes by, and are kept in the same file: on the next start nothing is measured.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from lade.backends.cpu.packing import pack as packing
from lade.decoding.drafting.step_cost import StepCost
from lade.errors import UnsupportedModelError
from lade.model.facts import ModelFacts
from lade.model.runner import runner_for
from lade.model.supports import supports
from lade.tuning.cost_cache import SIZES, step_cost_for

FEW = SIZES[1]
"""Tokens of a step with some guesses."""
TOLERANCE = 1.02
"""Factor by which a pass may get slower: curves are no more exact than that."""


def pack_if_it_pays(model: PreTrainedModel) -> str | None:
    """Pack a model if passes over a few tokens get faster by it, and those over one token no slower.

    So no text is decoded more slowly than without, guessed or not. Returns why it was not packed; None if it was.
    """
    try:
        if not packing.packable(model):
            return "its layers are small"
    except UnsupportedModelError as problem:
        return str(problem)
    before = _cost_of(model)
    if before is None:
        return "what its steps take cannot be measured beforehand"
    packing.pack(model)
    after = _cost_of(model)
    assert after is not None  # as before
    if pays(before, after):
        return None
    packing.unpack(model)
    return "its steps would be slower: " + ", ".join(
        f"{size} tokens {1e3 * before.seconds(size):.1f} ms, packed {1e3 * after.seconds(size):.1f}"
        for size in (1, FEW)
    )


def pays(before: StepCost, after: StepCost) -> bool:
    """Whether packing has paid, given what passes took before and take after it."""
    if after.seconds(1) > TOLERANCE * before.seconds(1):
        return False
    return after.seconds(1) + after.seconds(FEW) < before.seconds(1) + before.seconds(FEW)


def _cost_of(model: PreTrainedModel) -> StepCost | None:
    """What passes of a model take as it is; None where there is no runner without a prompt, or none at all."""
    support = supports(model)
    if not support or model.config.is_encoder_decoder:
        return None
    return step_cost_for(model, runner_for(ModelFacts.of(model), support.require(), model.generation_config))
