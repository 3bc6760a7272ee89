import numpy as np
import pytest

from training.plan import Shape, TrainPlan
from training.tokens import EncodedCorpus

ORDINARY = '''"""Count words, number {n}."""

import re


def count_{n}(text, limit={n}):
    """Return the words of `text` that occur at least `limit` times, with their counts."""
    counts = dict()
    for word in re.findall("[a-z]+", text.lower()):
        counts[word] = counts.get(word, 0) + {n}
    return [(word, seen) for word, seen in counts.items() if seen >= limit + {n}]
'''


@pytest.fixture
def root(tmp_path):
    """A source tree with ordinary files, held-out ones and ones to be skipped."""
    folder = tmp_path / "lib"
    names = ["queue.py", "heapq.py", "test/test_heapq.py", "test/test_queue.py", "site-packages/six.py", "pkg/a.py"]
    for number, name in enumerate(names, 2):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ORDINARY.format(n=number), encoding="utf-8")
    return folder


@pytest.fixture
def corpus():
    """Twelve documents of 30 to 85 random ids, every other one read twice."""
    random = np.random.default_rng(0)
    lengths = [30 + 5 * n for n in range(12)]
    ids = random.integers(3, 64, sum(lengths)).astype(np.uint16)
    return EncodedCorpus(ids, np.cumsum(lengths), np.array([1, 2] * 6))


@pytest.fixture
def plan():
    """Ten batches: eight of short rows, then two of long ones; loops beside the last three."""
    shares = {"long_share": 0.2, "decay_share": 0.25, "loop_share": 0.3}
    return TrainPlan(total_tokens=640, batch_tokens=64, short_tokens=16, long_tokens=32, warmup_tokens=128, **shares)


@pytest.fixture
def shape():
    return Shape(vocab_tokens=64, hidden=16, intermediate=32, layers=2, heads=2, kv_heads=1, context_tokens=32)
