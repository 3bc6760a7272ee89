"""Every way to call a listed family makes fewer passes than plain decoding, and `supports` agrees with all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from comparing import DOORS, prompt
from encoder_decoders import LISTED
from families import FAMILIES, RECURRENT_FAMILIES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import lade
from lade import announcements, version

CASES = [
    pytest.param(case, id=str(case))
    for case in (*FAMILIES, *RECURRENT_FAMILIES, *LISTED)
    if case.model_type in CONFIG_MAPPING
]
NEW = 24
CONFIG = lade.LookaheadConfig(budget=32)
"""Of random models hardly a text is easy to draft; 32 tokens a step shorten each of them."""


def counted(model: Any, call: Callable[[], torch.Tensor]) -> tuple[list[int], int]:
    """The new tokens of a call, and the passes of the model that it takes."""
    passes: list[None] = []
    handle = model.register_forward_pre_hook(lambda *given: passes.append(None))
    try:
        ids = call()
    finally:
        handle.remove()
    return ids[0, -NEW:].tolist(), len(passes)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES)
def test_every_door_of_a_supported_model_makes_fewer_passes(case):
    model, ids, given = case.build(), prompt(20), {"max_new_tokens": NEW, "do_sample": False}
    assert lade.supports(model), lade.supports(model).reason
    decoder = model.get_decoder()
    expected, plain = counted(decoder, lambda: model.generate(ids, **given))
    assert plain == NEW
    for name, door in DOORS.items():
        if name == "engine" and model.config.is_encoder_decoder:
            continue
        tokens, passes = counted(decoder, partial(door, model, input_ids=ids, lookahead=CONFIG, **given))
        assert tokens == expected, name
        assert passes < plain, f"{name}: {passes} passes for {NEW} tokens"


def test_a_version_that_was_never_tested_is_told_of_once(caplog):
    announcements.announce_once.cache_clear()
    newer = f"{version.TESTED_TRANSFORMERS[0]}.{version.TESTED_TRANSFORMERS[1] + 1}.0.dev0"
    with caplog.at_level(logging.WARNING, "lade"):
        for installed in ("5.17.0", ".".join(map(str, version.TESTED_TRANSFORMERS)) + ".9", "4.57.1"):
            version.note_untested_version(installed)
        assert not caplog.records
        for _ in range(2):
            version.note_untested_version(newer)
    assert len(caplog.records) == 1 and newer in caplog.text
