"""The struct of arrays that kernels take, a growing tree with its text; and the prior weights of copies."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from lade.decoding.kernels.layout import (
    AFTER_COPY,
    COPY_KINDS,
    END,
    LONGEST,
    MOST_MATCHES,
    MTP_DEPTHS,
    MTP_INPUTS,
    MTP_SLOTS,
    MTP_WIDTH,
    NOTE_KINDS,
    ORDERS,
    WIDTH,
    Doubles,
    Ints,
)
from lade.native.kernel import Struct

_MOST = (END + NOTE_KINDS + COPY_KINDS) * WIDTH + MTP_WIDTH
_NOTES = 2048  # slots; a later note overwrites an earlier one
_TEXT_ROOM = 1024  # initial capacity in tokens

# By bit set of the kinds of notes present: the weight of each kind, and a bias. Close to what they converge to.
_NOTE_WEIGHTS = ((0.0, 0.0, 0.0), (0.05, 0.0, 0.15), (0.0, 0.1, 0.3), (0.05, 0.1, 0.45))


Row = tuple[float, ...]

# By row of `copy_priors`: without a quote, an eighth of the values learned where a text is quoted, since text that a
# model writes by itself needs small weights; while a text is being quoted, for matches in the prompt, and for matches
# in the answer, three fifths of the learned values, as models repeat themselves loosely.
_PRIORS = (
    ((0.0, 0.05, 0.02), (0.07, 0.25, -0.01), (0.02, 0.33, 0.1)),
    ((0.02, 0.04, 0.0), (0.14, 0.21, -0.03), (0.2, 0.18, 0.02)),
    ((0.0, 0.03, 0.01), (0.07, 0.18, 0.02), (-0.02, 0.22, 0.02)),
    ((0.03, 0.03, 0.0), (0.1, 0.15, -0.02), (0.07, 0.11, -0.01)),
    ((0.01, 0.04, 0.0), (0.19, 0.12, 0.02), (0.02, 0.17, -0.01)),
    ((0.08, 0.02, 0.02), (0.25, 0.12, 0.03), (0.14, 0.1, 0.01)),
    ((0.03, 0.04, 0.0), (0.15, 0.11, 0.01), (-0.03, 0.19, -0.03)),
    ((0.08, 0.02, 0.02), (0.26, 0.09, 0.05), (0.11, 0.09, 0.01)),
    ((0.05, 0.03, 0.02), (0.22, 0.06, 0.03), (0.09, 0.11, 0.01)),
    ((0.09, 0.03, 0.03), (0.33, 0.1, 0.06), (0.15, 0.1, 0.03)),
    ((0.08, 0.04, 0.02), (0.34, 0.05, 0.04), (0.06, 0.16, -0.05)),
    ((0.15, 0.04, 0.03), (0.5, 0.14, 0.09), (0.16, 0.17, 0.0)),
    ((0.08, 0.03, 0.02), (0.83, -0.13, 0.13), (0.18, 0.09, 0.0)),
    ((0.1, 0.05, 0.02), (0.56, 0.19, 0.08), (0.27, 0.14, 0.04)),
)
_CALM, _OF_PROMPT, _OF_ANSWER = zip(*_PRIORS, strict=True)

_SHORT = 4  # rows for matches of one or two tokens
_CAUTION = 0.3  # factor of the learning rate: matches come in many lengths, few of them often


@cache
def copy_priors() -> tuple[Row, ...]:
    """Return the prior weights of copies, in four sets: for matches in the prompt and answer, before and after a copy.

    By bucket of the match length (see `LENGTH_BUCKETS`) and by whether all matches continue alike: the weight of the
    token after the latest longest match, that of the tokens after all matches, and a bias. Before the first copy a
    match of three tokens with the prompt counts half of what it does later, a shorter one next to nothing.

    Returns:
        `[4 * 14]` rows; the last column is a factor of the learning rate.
    """
    calm, of_prompt, of_answer = [(*row, _CAUTION) for row in _CALM], _at_once(_OF_PROMPT), _at_once(_OF_ANSWER)
    early = [(*(each / 2 for each in row[:-1]), 1.0) for row in of_prompt[_SHORT:]]
    return (*calm[:_SHORT], *early, *calm, *of_prompt, *of_answer)


def _at_once(rows: tuple[Row, ...]) -> list[Row]:
    return [(*row, 1.0) for row in rows]


_INT, _FLOAT = np.int32, np.float64
_ALONE = "ids parents depths logit_hits text_hits note_kinds candidates match_counts copy_line predicted listed by_mtp"
PER_NODE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ALONE.split(), (_INT,)),
    **dict.fromkeys(("scores", "bases"), (_FLOAT,)),
    **dict.fromkeys(("odds", "memory_odds"), (_FLOAT, _MOST)),
    **dict.fromkeys(("matches", "match_lengths"), (_INT, MOST_MATCHES)),
    "tokens": (_INT, _MOST),
    "tails": (_INT, LONGEST),
    "rows": (_INT, END, WIDTH),
    "note_rows": (_INT, NOTE_KINDS, WIDTH),
    "copy_rows": (_INT, COPY_KINDS, WIDTH),
}
"""Arrays of a `Work` with one entry for each node: dtype, and shape of an entry."""


class Work(NamedTuple):
    """A growing tree, and the features of its nodes; N is the capacity in nodes. `drafting.h` has the same fields."""

    ids: Ints  # [N], this and the next two as in `TokenTree`
    parents: Ints
    depths: Ints
    scores: Doubles  # [N], the probability that a node is accepted
    tails: Ints  # [N, LONGEST], the context of each node
    logit_hits: Ints  # [N], number of rows of logits that the memory has for the node; -1 before the lookup
    text_hits: Ints  # [N], number of rows of text that it has
    rows: Ints  # [N, END, WIDTH], these rows by kind
    note_kinds: Ints  # [N], bit set of the kinds of notes present
    note_rows: Ints  # [N, NOTE_KINDS, WIDTH], these notes
    # [M, 2 + WIDTH], logits seen at positions, whatever the text before them: position, token there or -1, row
    notes: Ints
    note_weights: Doubles  # [2 ** NOTE_KINDS, NOTE_KINDS + 1], by bit set: the weight of each kind, and a bias
    candidates: Ints  # [N], number of distinct tokens that rows, notes and copies suggest
    # [N, _MOST], these tokens and their log-odds; as many as were asked for are sorted to the front, likeliest first
    tokens: Ints
    odds: Doubles
    keys: Doubles  # [2 N], heap keys: score of the next child of a node, or an optimistic estimate
    nodes: Ints  # [2 N], node of each heap entry, and the rank of its child; rank -1 before the lookup
    ranks: Ints
    used: npt.NDArray[np.int64]  # [7], counters, indexed by `NODES` and the names after it
    text: Ints  # [T], ids of the text; unused capacity comes last
    links: Ints  # [T], index of the previous occurrence of each token, -1 for none
    # [2 T, 2], hash table of the last occurrence of each token: token and index, which is -1 for a token that occurs no
    # more, and -2 in free slots
    latest: Ints
    # [N, MOST_MATCHES], index of the token after each earlier occurrence of the node's suffix, longest match first
    matches: Ints
    match_lengths: Ints  # [N, MOST_MATCHES], number of matching tokens
    match_counts: Ints  # [N], number of matches
    copy_line: Ints  # [N], row of `copy_weights` in use; -1 without matches
    copy_rows: Ints  # [N, COPY_KINDS, WIDTH], the tokens after the matches
    # [8 * LENGTH_BUCKETS, COPY_KINDS + 2], weight of each row, a bias, a factor of the learning rate: `copy_priors`
    copy_weights: Doubles
    predicted: Ints  # [N], index of the MTP layer's prediction after each node; -1 without one
    # [N, _MOST], at nodes with a prediction the log-odds before the final mixing; NaN for tokens of the layer alone
    memory_odds: Doubles
    # [N], at nodes with a prediction the number of tokens, including those after the candidates, which only the layer
    # suggests and which are too unlikely to be drafted
    listed: Ints
    bases: Doubles  # [N], log-odds before the final mixing of tokens that only the layer suggests
    by_mtp: Ints  # [N], 1 where the layer gives the node higher odds than the memory does, else 0
    # [E], the node that each prediction follows: index of its parent's prediction, token, and depth, counted from 1 at
    # the root; the root's prediction comes first
    mtp_parents: Ints
    mtp_ids: Ints
    mtp_depths: Ints
    mtp_tokens: Ints  # [E, MTP_WIDTH], predicted tokens, -1 for none
    mtp_odds: Doubles  # [E, MTP_WIDTH], their log-odds
    mtp_weights: Doubles  # [MTP_DEPTHS * (len(ORDERS) + 1), MTP_INPUTS], see `drafting.mtp_tree`; shared by texts
    mtp_trust: Doubles  # [1], log-odds of the share of the final mixing; shared by texts

    @classmethod
    def of(cls, room: int) -> Work:
        """Return empty arrays with room for N nodes."""
        per_node = {name: np.zeros((room, *shape), dtype) for name, (dtype, *shape) in PER_NODE.items()}
        per_node["predicted"].fill(-1)
        return cls(
            **per_node,
            keys=np.empty(2 * room + 2),
            nodes=np.empty(2 * room + 2, np.int32),
            ranks=np.empty(2 * room + 2, np.int32),
            notes=np.full((_NOTES, 2 + WIDTH), -2, np.int32),
            note_weights=np.array(_NOTE_WEIGHTS),
            used=np.array([0, 0, 0, 0, 0, -AFTER_COPY, 0], np.int64),
            copy_weights=np.array(copy_priors()),
            mtp_parents=np.full(MTP_SLOTS, -1, np.int32),
            mtp_ids=np.full(MTP_SLOTS, -1, np.int32),
            mtp_depths=np.ones(MTP_SLOTS, np.int32),
            mtp_tokens=np.full((MTP_SLOTS, MTP_WIDTH), -1, np.int32),
            mtp_odds=np.zeros((MTP_SLOTS, MTP_WIDTH)),
            mtp_weights=np.zeros((MTP_DEPTHS * (len(ORDERS) + 1), MTP_INPUTS)),
            mtp_trust=np.zeros(1),
            **empty_text(_TEXT_ROOM),
        )

    def widened(self, room: int) -> Work:
        """Return a copy with room for more nodes."""
        wider = Work.of(room)._replace(
            text=self.text, links=self.links, latest=self.latest, mtp_weights=self.mtp_weights, mtp_trust=self.mtp_trust
        )
        for before, after in zip(cast(Iterable[Any], self), cast(Iterable[Any], wider), strict=True):
            after[: len(before)] = before
        return wider


def empty_text(room: int) -> dict[str, Any]:
    """Return the arrays of a text with room for so many tokens."""
    columns = {name: np.zeros(room, np.int32) for name in ("text", "links")}
    return {**columns, "latest": np.full((2 * room, 2), -2, np.int32)}


class Held(Struct):
    """A `Work` as kernels take it: addresses of its arrays, and sizes of those that differ. Its own address stays."""

    __slots__ = ("work",)

    def __init__(self, work: Work) -> None:
        super().__init__([0] * (len(work) + 4), ())
        self.use(work)

    def use(self, work: Work) -> None:
        """Switch to other arrays."""
        self.work = work
        self._arrays = arrays = cast(tuple[npt.NDArray[Any], ...], work)
        sizes = len(work.ids), len(work.notes), len(work.text), len(work.latest)
        self.fields[:] = [*(array.ctypes.data for array in arrays), *sizes]
