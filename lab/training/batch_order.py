"""The order in which training reads the corpus: a pure function of the seed, so that a resumed run reads on.

An epoch is every document as often as it repeats, in an order shuffled by (seed, epoch), packed into one stream
and cut into rows; the rows are shuffled too. Each row begins with BOS wherever it was cut, so that a prompt, which
begins with BOS as well, is never a surprise.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from training.tokens import BOS_ID, EncodedCorpus


class RowOrder:
    """An endless, numbered sequence of rows of T + 1 ids (T inputs and, shifted by one, T labels)."""

    def __init__(self, corpus: EncodedCorpus, row_tokens: int, seed: int) -> None:
        self.row_tokens, self.seed = row_tokens, seed
        self._corpus = corpus
        self._epoch, self._rows = -1, np.empty((0, row_tokens), dtype=np.uint16)
        epoch_tokens = int((np.diff(corpus.ends, prepend=0) * corpus.repeats).sum())
        self.rows_per_epoch = epoch_tokens // row_tokens

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Return rows `first` to `first + count - 1` of the sequence, int64 [count, T + 1]."""
        rows = np.stack([self._row(number) for number in range(first, first + count)])
        bos = np.full((count, 1), BOS_ID, dtype=np.int64)
        return torch.from_numpy(np.concatenate([bos, rows.astype(np.int64)], axis=1))

    def _row(self, number: int) -> NDArray[np.uint16]:
        epoch, place = divmod(number, self.rows_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, self._pack(epoch)
        row: NDArray[np.uint16] = self._rows[place]
        return row

    def _pack(self, epoch: int) -> NDArray[np.uint16]:
        """Return the rows of an epoch, shuffled [rows, T]."""
        shuffle = np.random.default_rng([self.seed, epoch, self.row_tokens])
        starts = np.concatenate([[0], self._corpus.ends[:-1]])
        documents = shuffle.permutation(np.repeat(np.arange(len(starts)), self._corpus.repeats))
        stream = np.concatenate([self._corpus.ids[starts[d] : self._corpus.ends[d]] for d in documents])
        rows = stream[: self.rows_per_epoch * self.row_tokens].reshape(self.rows_per_epoch, self.row_tokens)
        return shuffle.permutation(rows)
