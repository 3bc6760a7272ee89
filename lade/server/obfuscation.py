"""Padding that hides how long events are.

Who sees the packets of an encrypted stream sees how much text came at a time, and with lookahead decoding that tells
how well a text was foreseen (Wei et al. 2024, https://arxiv.org/abs/2411.01076).
"""

from __future__ import annotations

import secrets
from typing import Any

from lade.server.replies import encoded

BUCKET = 256
"""Bytes: events have a multiple of it."""


def padded(value: dict[str, Any]) -> dict[str, Any]:
    """An event's value with the member that OpenAI pads with, so that its JSON has a multiple of `BUCKET` bytes."""
    missing = -len(encoded({**value, "obfuscation": ""})) % BUCKET
    return {**value, "obfuscation": secrets.token_hex(missing)[:missing]}
