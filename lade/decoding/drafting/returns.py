"""What a look for guesses brings a batch, and how long it had better not look.

A controller goes by what it expects: of guesses, of passes over several sizes, of what feeding teaches. For a batch all
that is less certain than for a single row, and there is less to gain, since several rows fill a pass anyway; and it has
to look once for every row. So what comes of a look is counted, next to the plain steps that could have been made
instead, whichever source the guesses came from. Where that is a loss, looks are so far apart on average that it is
`ALLOWANCE` of the time, or as far as a controller rests at all, 64 steps. One that has won is followed by another at
once, so that a text that has become easy to guess is soon found out.

Where looks are rare, so is what they make of a memory. Then it is not worth the language model head's time for every
token of a prompt either, to have its logits remembered; which tokens followed which is learned of any prompt.

A single row is not held to all that. A text, or a memory that is kept, begins with losses and ends with gains, and
rests teach nothing (lab/log/batches-and-engine.md, "Drafting in a batch: back-off after losses").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ALLOWANCE = 0.005
"""Of the time, for looks that bring nothing."""
RARE = 16
"""Steps from one look to the next that are many."""
_LOOKS = 16  # that the mean is over
_MOST_LOST = 4.0  # by one of them: what took longer was an accident, or compiling


@dataclass
class Returns:
    """A running mean.

    Attributes:
        mean: plain steps that a look, and feeding what it found, has won; below 0.0 it has lost them.
    """

    mean: float = 0.0

    def add(self, emitted: float, took: float) -> None:
        """Of a step in which guesses were looked for, fed or not.

        Args:
            emitted: tokens that it yielded, which are as many plain steps.
            took: its time, in plain steps.
        """
        self.mean += (max(emitted - took, -_MOST_LOST) - self.mean) / _LOOKS

    @property
    def rest(self) -> int:
        """Steps without a look that make up for one."""
        return math.ceil(max(0.0, -self.mean) / ALLOWANCE)

    @property
    def rare(self) -> bool:
        """Whether looks are so rare that logits of prompts would hardly be used."""
        return self.rest >= RARE
