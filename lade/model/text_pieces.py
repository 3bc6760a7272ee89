"""Into which passes a text may be cut, so that it becomes the text that plain decoding makes of it.

For most models any will do: attention computes the same for a token, whatever is fed with it. Two kinds of models give
other results when the same text is fed in other pieces:

- recurrent layers feed a single token with another function than several, and what the latter limits, the former may
  not; some begin with an empty state whenever several tokens are fed;
- indexers pick among the keys of all that is fed at once, and which of equal ones they pick depends on how many there
  are. A token that sees no more keys than they pick sees all of these, however it is fed.
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
        anywhere: whether a text may be cut anywhere; if not, an answer in it has to be fed as decoding fed it.
        shareable: first tokens of a text whose keys and values are those of any text that begins like it. Where there
            are states, these are not of first tokens, so none.
    """

    def __init__(self, cores: CorePatches, slots: SlotPatches) -> None:
        self._has_states, self._forgets, self._picked = bool(cores), cores.forgets, slots.picked_keys
        self.anywhere = not cores and self._picked is None
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
