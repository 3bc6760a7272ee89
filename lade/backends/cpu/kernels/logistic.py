"""Numbers times a logistic function: all go through the same instructions."""

from __future__ import annotations

from typing import Any

from lade.backends.cpu.kernels.exponentials import over_exp
from lade.backends.cpu.kernels.instructions import load_long, load_one, next_part
from lade.backends.cpu.kernels.vectors import LANES, as_floats, spread, store_as
from lade.compilation import TeamKernel, inlined


@inlined
def _weigh_by_logistic(x: Any, found: Any, kind: Any, steep: Any, cubic: Any, first: Any, last: Any) -> None:
    """Fill in `found`, x over 1 + exp(steep * x + cubic * x ** 3), from number `first` to the one before `last`.

    The last vector may begin before the end of the one before it, and writes the same bits once more.

    Args:
        x: address of numbers, at least `LANES` from `first` to `last`.
        found: address of what becomes of them, not that of x.
        kind: of both, float32 or bfloat16.
        steep: see above.
        cubic: see above.
        first: of the numbers.
        last: of them, and one.
    """
    item, steeps, cubics = 2 if kind else 4, spread(steep), spread(cubic)
    for begin in range(first, last, LANES):
        at = item * min(begin, last - LANES)
        numbers = over_exp(as_floats(x + at, kind), steeps, cubics)
        store_as(found + at, numbers, kind)


def _weigh_in_team(address: Any) -> None:
    """See `weigh_by_logistic`."""
    part, parts, numbers = next_part(address), load_long(address + 8), load_long(address + 56)
    x, found, kind = load_long(address + 16), load_long(address + 24), load_long(address + 32)
    steep, cubic = load_one(address + 40), load_one(address + 48)
    while part < parts:
        first, last = numbers * part // parts, numbers * (part + 1) // parts
        _weigh_by_logistic(x, found, kind, steep, cubic, first, last)
        part = next_part(address)


weigh_by_logistic = TeamKernel(_weigh_in_team)
"""`_weigh_by_logistic` by a team of threads: its fields are the arguments, factors in bits of float32, and how many
numbers there are."""
