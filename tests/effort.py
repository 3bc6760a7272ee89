"""How many examples tests of properties try, and which cases of others."""

from typing import Any

import pytest
from hypothesis import settings


def examples(usual: int) -> int:
    """A quarter of `usual` with the profile `quick`, and 40 % with `thorough`, that of `make test-slow`."""
    return max(3, usual * settings.default.max_examples // 100)


def now_and_then(*cases: Any) -> list[Any]:
    """Cases that are left to `make test-slow`."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]
