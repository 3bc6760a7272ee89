"""A tree while it grows, in arrays, and how compiled code holds them as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.experimental import structref

from lade.compilation import compiled
from lade.decoding.kernels.layout import (
    AFTER_COPY,
    END,
    LONGEST,
    MTP_DEPTHS,
    MTP_INPUTS,
    MTP_SLOTS,
    MTP_WIDTH,
    NEAR,
    ORDERS,
    SPOTS,
    TOLD,
    WIDTH,
    Doubles,
    Ints,
)
from lade.decoding.kernels.told_weights import told_weights

_MOST = (END + NEAR + TOLD) * WIDTH + MTP_WIDTH
_NOTES = 2048  # slots; a later note takes the place of an earlier one

# By the kinds that there are notes of, one bit each: the weight of each, and a bias. About what they become.
_NEAR_WEIGHTS = ((0.0, 0.0, 0.0), (0.05, 0.0, 0.15), (0.0, 0.1, 0.3), (0.05, 0.1, 0.45))


class Work(NamedTuple):
    """A tree while it grows, and what is known at each of its nodes; N is how many there is room for.

    Attributes:
        ids, parents, depths: int32 `[N]`, as of a `TokenTree`.
        scores: float64 `[N]`, the probability that a node is accepted.
        tails: int32 `[N, LONGEST]`, the context of each node.
        found: int32 `[N]`, how many rows of logits the memory has for it; -1 where it has not been looked up.
        heard: int32 `[N]`, how many rows of what followed in the text.
        rows: int32 `[N, END, WIDTH]`, these rows, each where its kind belongs.
        near: int32 `[N]`, which kinds of notes there are, one bit each.
        near_rows: int32 `[N, NEAR, WIDTH]`, these notes.
        notes: int32 `[M, 2 + WIDTH]`, what was said at places of the text, whatever stood before: the place, the token
            there or -1, the row.
        near_weights: float64 `[2 ** NEAR, NEAR + 1]`, for each choice of kinds the weight of each, and a bias.
        offers: int32 `[N]`, how many different tokens rows and notes suggest.
        tokens, odds: int32 and float64 `[N, _MOST]`, the tokens and their log-odds; as many of the
            likeliest come first, in order, as have been asked for.
        keys: float64 `[2 N]`, of a heap: the score that the next child of a node has, or may have.
        nodes, ranks: int32 `[2 N]`, of the same heap: which node, and which of its children; -1 where the node has not
            been looked up.
        used: int64 `[7]`, numbers of what there is, by `NODES`, `HEAP`, `ROOT`, `READ`, `PROMPT`, `COPY`, `PREDICTED`.
        text, links: int32 `[T]`, the text, and where each of its tokens stood before that, -1 for nowhere.
        spots: int32 `[N, SPOTS]`, the numbers of the tokens that follow at earlier places, the longest ends first.
        agreed: int32 `[N, SPOTS]`, how many tokens before each are those at the end of the node's text.
        spot_counts: int32 `[N]`, how many such places there are.
        told: int32 `[N]`, which of `told_weights` are in use; -1 where there are no such places.
        told_rows: int32 `[N, TOLD, WIDTH]`, what followed there.
        told_weights: float64 `[8 * END_KINDS, TOLD + 2]`, the weight of either row, a bias, and how fast they are
            learned, see `told_weights`.
        predicted: int32 `[N]`, the number of the MTP layer's prediction behind each node; -1 without one.
        memory_odds: float64 `[N, _MOST]`, where there is a prediction the log-odds before the last mixing; NaN for
            tokens that only the layer suggests.
        listed: int32 `[N]`, where there is a prediction how many tokens there are with those behind the offers, which
            only the layer suggests, and too faintly for them to be drafted.
        bases: float64 `[N]`, log-odds before the last mixing of tokens that only the layer suggests.
        by_mtp: int32 `[N]`, 1 where the layer gives the node higher odds than the memory does, else 0.
        mtp_parents, mtp_ids, mtp_depths: int32 `[E]`, the node that each prediction follows: the number of its parent's
            prediction, its token, and its depth from 1, the root's, on. The root's prediction comes first.
        mtp_tokens, mtp_odds: int32 and float64 `[E, MTP_WIDTH]`, the predicted tokens, -1 for none, and their log-odds.
        mtp_weights: float64 `[MTP_DEPTHS * (len(ORDERS) + 1), MTP_INPUTS]`, see `drafting.mtp_tree`; shared by texts.
        mtp_trust: float64 `[1]`, log-odds of the share that the last mixing has; likewise.
    """

    ids: Ints
    parents: Ints
    depths: Ints
    scores: Doubles
    tails: Ints
    found: Ints
    heard: Ints
    rows: Ints
    near: Ints
    near_rows: Ints
    notes: Ints
    near_weights: Doubles
    offers: Ints
    tokens: Ints
    odds: Doubles
    keys: Doubles
    nodes: Ints
    ranks: Ints
    used: npt.NDArray[np.int64]
    text: Ints
    links: Ints
    spots: Ints
    agreed: Ints
    spot_counts: Ints
    told: Ints
    told_rows: Ints
    told_weights: Doubles
    predicted: Ints
    memory_odds: Doubles
    listed: Ints
    bases: Doubles
    by_mtp: Ints
    mtp_parents: Ints
    mtp_ids: Ints
    mtp_depths: Ints
    mtp_tokens: Ints
    mtp_odds: Doubles
    mtp_weights: Doubles
    mtp_trust: Doubles

    @classmethod
    def of(cls, room: int) -> Work:
        """Empty, with room for N nodes."""
        ints = [np.empty(room, np.int32) for _ in range(9)]
        ids, parents, depths, found, heard, near, offers, spot_counts, told = ints
        return cls(
            ids=ids,
            parents=parents,
            depths=depths,
            scores=np.empty(room),
            tails=np.empty((room, LONGEST), np.int32),
            found=found,
            heard=heard,
            rows=np.empty((room, END, WIDTH), np.int32),
            near=near,
            near_rows=np.empty((room, NEAR, WIDTH), np.int32),
            notes=np.full((_NOTES, 2 + WIDTH), -2, np.int32),
            near_weights=np.array(_NEAR_WEIGHTS),
            offers=offers,
            tokens=np.empty((room, _MOST), np.int32),
            odds=np.empty((room, _MOST)),
            keys=np.empty(2 * room + 2),
            nodes=np.empty(2 * room + 2, np.int32),
            ranks=np.empty(2 * room + 2, np.int32),
            used=np.array([0, 0, 0, 0, 0, -AFTER_COPY, 0], np.int64),
            text=np.zeros(1, np.int32),
            links=np.zeros(1, np.int32),
            spots=np.empty((room, SPOTS), np.int32),
            agreed=np.empty((room, SPOTS), np.int32),
            spot_counts=spot_counts,
            told=told,
            told_rows=np.empty((room, TOLD, WIDTH), np.int32),
            told_weights=np.array(told_weights()),
            predicted=np.full(room, -1, np.int32),
            memory_odds=np.empty((room, _MOST)),
            listed=np.zeros(room, np.int32),
            bases=np.empty(room),
            by_mtp=np.zeros(room, np.int32),
            mtp_parents=np.full(MTP_SLOTS, -1, np.int32),
            mtp_ids=np.full(MTP_SLOTS, -1, np.int32),
            mtp_depths=np.ones(MTP_SLOTS, np.int32),
            mtp_tokens=np.full((MTP_SLOTS, MTP_WIDTH), -1, np.int32),
            mtp_odds=np.zeros((MTP_SLOTS, MTP_WIDTH)),
            mtp_weights=np.zeros((MTP_DEPTHS * (len(ORDERS) + 1), MTP_INPUTS)),
            mtp_trust=np.zeros(1),
        )

    def widened(self, room: int) -> Work:
        """The same with more room."""
        wider = Work.of(room)._replace(
            text=self.text, links=self.links, mtp_weights=self.mtp_weights, mtp_trust=self.mtp_trust
        )
        for before, after in zip(cast(Iterable[Any], self), cast(Iterable[Any], wider), strict=True):
            after[: len(before)] = before
        return wider


_WORK = cast(Any, numba).typeof(Work.of(1))


@structref.register
class HeldType(numba.types.StructRef):
    """The type of `Held`."""


cast(Any, structref).define_boxing(HeldType, structref.StructRefProxy)
HELD = cast(Any, HeldType)([("work", _WORK)])
_new: Any = structref.new


class Held(NamedTuple):
    """A `Work` as compiled code holds it, that is as one thing: each call with its arrays would look at all of them.

    This stands in its place where numba is switched off.
    """

    work: Work


def hold(work: Work) -> Held:
    """Have compiled code hold these arrays."""
    return Held(work) if cast(Any, numba.config).DISABLE_JIT else _held(work)


@compiled(_WORK)
def _held(work: Work) -> Any:
    held = _new(HELD)
    held.work = work
    return held
