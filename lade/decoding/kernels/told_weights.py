"""How far what followed at earlier places is trusted at first, before a text has taught it; see `work`.

By the length of the longest end that stood there before (1, 2, 3, 4 and 5, 6 and 7, 8 to 15, and more tokens), and
whether all these places were followed by the same: the weight of what followed the latest of the longest, that of what
followed each, and a bias.
"""

from __future__ import annotations

from functools import cache

Row = tuple[float, ...]

# An eighth of what they become where a text is quoted: what a model writes by itself wants them small.
_CALM = (
    (0.0, 0.05, 0.02),
    (0.02, 0.04, 0.0),
    (0.0, 0.03, 0.01),
    (0.03, 0.03, 0.0),
    (0.01, 0.04, 0.0),
    (0.08, 0.02, 0.02),
    (0.03, 0.04, 0.0),
    (0.08, 0.02, 0.02),
    (0.05, 0.03, 0.02),
    (0.09, 0.03, 0.03),
    (0.08, 0.04, 0.02),
    (0.15, 0.04, 0.03),
    (0.08, 0.03, 0.02),
    (0.1, 0.05, 0.02),
)

# Of places in the prompt, where a text is being quoted.
_OF_PROMPT = (
    (0.07, 0.25, -0.01),
    (0.14, 0.21, -0.03),
    (0.07, 0.18, 0.02),
    (0.1, 0.15, -0.02),
    (0.19, 0.12, 0.02),
    (0.25, 0.12, 0.03),
    (0.15, 0.11, 0.01),
    (0.26, 0.09, 0.05),
    (0.22, 0.06, 0.03),
    (0.33, 0.1, 0.06),
    (0.34, 0.05, 0.04),
    (0.5, 0.14, 0.09),
    (0.83, -0.13, 0.13),
    (0.56, 0.19, 0.08),
)

# Of places in the answer, likewise: three fifths of what they become, since models repeat themselves less exactly.
_OF_ANSWER = (
    (0.02, 0.33, 0.1),
    (0.2, 0.18, 0.02),
    (-0.02, 0.22, 0.02),
    (0.07, 0.11, -0.01),
    (0.02, 0.17, -0.01),
    (0.14, 0.1, 0.01),
    (-0.03, 0.19, -0.03),
    (0.11, 0.09, 0.01),
    (0.09, 0.11, 0.01),
    (0.15, 0.1, 0.03),
    (0.06, 0.16, -0.05),
    (0.16, 0.17, 0.0),
    (0.18, 0.09, 0.0),
    (0.27, 0.14, 0.04),
)

_SHORT = 4  # of the first rows: one or two tokens agree
_CAUTION = 0.3  # of the rate of learning: ends of a text come in many lengths, few of them often


@cache
def told_weights() -> tuple[Row, ...]:
    """Four sets: for places in the prompt and in the answer, and the same for a text that is being quoted.

    Where nothing has been copied yet, three tokens of the prompt tell half as much as later, fewer next to nothing.

    Returns:
        `[4 * 14]` rows, each with the share of the rate of learning by which it is learned at the end.
    """
    calm, of_prompt, of_answer = [(*row, _CAUTION) for row in _CALM], _at_once(_OF_PROMPT), _at_once(_OF_ANSWER)
    early = [(*(each / 2 for each in row[:-1]), 1.0) for row in of_prompt[_SHORT:]]
    return (*calm[:_SHORT], *early, *calm, *of_prompt, *of_answer)


def _at_once(rows: tuple[Row, ...]) -> list[Row]:
    return [(*row, 1.0) for row in rows]
