"""Into which passes a text may be cut without anything becoming another text's.

For most models any: attention computes the same for a token, whatever is fed with it. Two kinds of models tell how they
were fed:

- recurrent layers feed a single token with another function than several, which may not limit what that for several
  limits; and the latter may begin with an empty state;
- indexers pick among the keys of all that is fed at once: which of equal ones depends on how many there are. A token
  that sees no more keys than are picked sees all of them, however it is fed.
"""

from __future__ import annotations

import sys

from lade.model.recurrent.cores import CorePatches
from lade.model.slot_patches import SlotPatches


class TextPieces:
    """The pieces into which texts are cut for one model.

    Args:
        cores: of its recurrent layers.
        slots: its indexers are among them.

    Attributes:
        any: whether any pieces will do, of a prompt and of an answer; else answers are fed as decoding feeds them.
        shareable: first tokens of a text whose keys and values are those of any text that begins like it. Where there
            are states, these are not of first tokens, so none.
    """

    def __init__(self, cores: CorePatches, slots: SlotPatches) -> None:
        self._has_states, self._forgets, self._picked = bool(cores), cores.forgets, slots.picked_keys
        self.any = not cores and self._picked is None
        self.shareable = 0 if cores else sys.maxsize if self._picked is None else self._picked

    def end(self, fed: int, most: int, length: int) -> int:
        """Where the next piece of a prompt ends, so that pieces give what the whole prompt gives.

        Args:
            fed: tokens that the cache holds.
            most: tokens to feed, at most, unless the pieces have to be longer.
            length: of the prompt.
        """
        end = min(length, fed + (max(most, 2) if self._has_states else most))
        if self._forgets or (self._picked is not None and end > self._picked):
            return length
        return length if self._has_states and end == length - 1 else end
