"""What the processor can do that is compiled for."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numba
from numba.core.registry import cpu_target


@cache
def has_features(*names: str) -> bool:
    """Whether numba compiles for all of these, such as "avx2"; never where it is switched off."""
    _, _, found = cast(Any, cpu_target).target_context.codegen().magic_tuple()
    return {f"+{name}" for name in names} <= set(found.split(",")) and not cast(Any, numba).config.DISABLE_JIT
