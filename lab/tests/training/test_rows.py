import numpy as np
import torch

from training.batch_order import RowOrder
from training.tokens import BOS_ID


def test_the_order_depends_on_the_seed_alone_and_not_on_how_rows_are_batched(corpus):
    one, other = RowOrder(corpus, 16, seed=5), RowOrder(corpus, 16, seed=5)
    other.batch(3 * other.rows_per_epoch, 1)  # a later epoch first: nothing is carried over
    assert torch.equal(one.batch(0, 9), other.batch(0, 9))
    assert not torch.equal(one.batch(0, 9), RowOrder(corpus, 16, seed=6).batch(0, 9))
    order = RowOrder(corpus, 16, seed=1)
    last = order.rows_per_epoch + 4  # over the epoch's end
    single = [order.batch(number, 1) for number in range(last)]
    assert torch.equal(torch.cat(single), order.batch(0, last))


def test_an_epoch_reads_every_document_as_often_as_it_repeats(corpus):
    order = RowOrder(corpus, 1, seed=1)
    read = order.batch(0, order.rows_per_epoch)[:, 1].numpy()
    per_document = np.split(corpus.ids, corpus.ends[:-1])
    expected = np.concatenate([np.tile(d, r) for d, r in zip(per_document, corpus.repeats, strict=True)])
    assert np.array_equal(np.sort(read), np.sort(expected))


def test_rows_begin_with_bos_have_one_label_more_than_inputs_and_differ_from_epoch_to_epoch(corpus):
    rows = RowOrder(corpus, 16, seed=1).batch(0, 5)
    assert rows.shape == (5, 17)
    assert (rows[:, 0] == BOS_ID).all()
    order = RowOrder(corpus, 16, seed=1)
    n = order.rows_per_epoch
    assert not torch.equal(order.batch(0, n), order.batch(n, n))
