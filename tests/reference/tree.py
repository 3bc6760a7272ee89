"""A tree as C++ has it, `struct Tree` of `drafting.h`: its parts as arrays, where they lie or copied."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from lade.decoding.kernels.layout import COPY_KINDS, END, LONGEST, MOST_CANDIDATES, MTP_WIDTH, NOTE_KINDS, TEXT, WIDTH
from lade.decoding.kernels.native_tree import NativeTree
from lade.native.kernel import STRUCT, kernel

AT_TOKEN = 1
"""Kind of the notes for a position and a token there; 0: for a position."""
MOST_MATCHES = 16
"""Maximum number of earlier occurrences kept per node: those with the longest matching suffixes."""
LATEST, EACH = 0, 1
"""Kinds of copy rows: the token after the latest longest match, those after all matches."""
LENGTH_BUCKETS = 7
"""Buckets of match lengths: 1, 2, 3, 4 to 5, 6 to 7, 8 to 15, and more tokens."""
AFTER_COPY = 64
"""Number of tokens after a copy during which further copies are likely."""
_ROOM = 300  # nodes and predictions in a copy

NODE = np.dtype(
    [
        ("id", "i4"),
        ("parent", "i4"),
        ("depth", "i4"),
        ("by_mtp", "i4"),
        ("score", "f8"),
        ("tail", "i4", LONGEST),
        ("logit_hits", "i4"),
        ("text_hits", "i4"),
        ("note_kinds", "i4"),
        ("copy_line", "i4"),
        ("prediction", "i4"),
        ("match_count", "i4"),
        ("matches", "i4", (MOST_MATCHES, 2)),
        ("rows", "i4", (END, WIDTH)),
        ("note_rows", "i4", (NOTE_KINDS, WIDTH)),
        ("copy_rows", "i4", (COPY_KINDS, WIDTH)),
        ("candidates", "i4"),
        ("listed", "i4"),
        ("base", "f8"),
        ("tokens", "i4", MOST_CANDIDATES),
        ("odds", "f8", MOST_CANDIDATES),
        ("memory_odds", "f8", MOST_CANDIDATES),
    ],
    align=True,
)
NEW_NODE = np.zeros((), NODE)
NEW_NODE["score"] = 1.0
for _name in ("parent", "logit_hits", "copy_line", "prediction"):
    NEW_NODE[_name] = -1
PARTS = {
    "excluded": np.dtype("i4"),
    "counters": np.dtype("i8"),
    "nodes": NODE,
    "heap": np.dtype([("key", "f8"), ("node", "i4"), ("rank", "i4")]),
    "text": np.dtype("i4"),
    "links": np.dtype("i4"),
    "notes": np.dtype([("place", "i4"), ("token", "i4"), ("row", "i4", WIDTH)]),
    "predictions": np.dtype(
        [("parent", "i4"), ("token", "i4"), ("depth", "i4"), ("tokens", "i4", MTP_WIDTH), ("odds", "f8", MTP_WIDTH)],
        align=True,
    ),
    "note_weights": np.dtype(("f8", NOTE_KINDS + 1)),
    "copy_weights": np.dtype(("f8", COPY_KINDS + 2)),
}


@kernel(STRUCT, STRUCT)
def _parts(tree: NativeTree, parts: Any) -> None: ...


def parts_of(tree: NativeTree) -> dict[str, np.ndarray]:
    """The parts where they lie, until the tree changes."""
    found = (ctypes.c_int64 * (3 * len(PARTS)))()
    _parts(tree, ctypes.addressof(found))
    views = {}
    for (name, dtype), address, rows, size in zip(PARTS.items(), found[::3], found[1::3], found[2::3], strict=True):
        assert size == dtype.itemsize, f"{name}: drafting.h has another layout"
        part = (
            np.frombuffer((ctypes.c_char * (rows * size)).from_address(address), dtype) if rows else np.zeros(0, dtype)
        )
        views[name] = part
    return views


class Tree:
    """Copies of all parts, with room for more nodes and predictions, which the reference forms of kernels change."""

    def __init__(self, tree: NativeTree) -> None:
        parts = parts_of(tree)
        self.excluded = parts["excluded"].tolist()
        self.vocabulary, self.root, self.prompt, self.copy = parts["counters"].tolist()
        self.heap = [tuple(offer) for offer in parts["heap"].tolist()]
        self.text, self.links = parts["text"].tolist(), parts["links"].tolist()
        self.notes = parts["notes"].copy()
        self.note_weights, self.copy_weights = parts["note_weights"].copy(), parts["copy_weights"].copy()
        self.mtp_weights, self.mtp_trust = (array.copy() for array in tree._mtp or (np.zeros((0, 0)), np.zeros(0)))
        self.nodes, self.predictions = (self._roomy(parts[name]) for name in ("nodes", "predictions"))
        self.count, self.predicted = len(parts["nodes"]), len(parts["predictions"])

    @staticmethod
    def _roomy(part: np.ndarray) -> np.ndarray:
        roomy = np.zeros(len(part) + _ROOM, part.dtype)
        roomy[: len(part)] = part
        return roomy

    def __getattr__(self, name: str) -> np.ndarray:
        """A column of the nodes."""
        if name not in NODE.names:
            raise AttributeError(name)
        return self.nodes[name]

    def arrays(self) -> dict[str, np.ndarray]:
        """All parts that may change, by name."""
        return {
            **columns_of("nodes", written(self.nodes[: self.count])),
            **columns_of("heap", np.array(self.heap, PARTS["heap"])),
            **columns_of("predictions", self.predictions[: self.predicted]),
            **columns_of("notes", self.notes),
            "counters": np.array([self.vocabulary, self.root, self.prompt, self.copy]),
            "text": np.array(self.text, np.int32),
            "links": np.array(self.links, np.int32),
            "note_weights": self.note_weights,
            "copy_weights": self.copy_weights,
            "mtp_weights": self.mtp_weights,
            "mtp_trust": self.mtp_trust,
        }


def written(nodes: np.ndarray) -> np.ndarray:
    """A copy of nodes with zeros where nothing has been written: C++ leaves new arrays as they are."""
    nodes = nodes.copy()
    for node in nodes:
        used = max(node["candidates"], node["listed"])
        node["matches"][node["match_count"] :] = 0
        node["rows"][max(node["logit_hits"], 0) : TEXT] = node["rows"][TEXT + node["text_hits"] :] = 0
        node["note_rows"][[not node["note_kinds"] >> kind & 1 for kind in range(NOTE_KINDS)]] = 0
        node["copy_rows"][COPY_KINDS if node["copy_line"] >= 0 else 0 :] = 0
        node["tokens"][used:] = node["odds"][used:] = 0
        node["memory_odds"][used if node["prediction"] >= 0 else 0 :] = 0
    return nodes


def columns_of(name: str, part: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of a part, by name."""
    return {f"{name}.{column}": part[column] for column in part.dtype.names}
