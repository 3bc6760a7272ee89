"""How many examples tests of properties try."""

from hypothesis import settings


def examples(usual: int) -> int:
    """As many as usual with the profile `thorough`, that of `make test-slow`, and a quarter with `quick`."""
    return max(3, usual * settings.default.max_examples // 100)
