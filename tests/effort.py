"""How many examples tests of properties try."""

from hypothesis import settings


def examples(usual: int) -> int:
    """A quarter of `usual` with the profile `quick`, and 40 % with `thorough`, that of `make test-slow`."""
    return max(3, usual * settings.default.max_examples // 100)
