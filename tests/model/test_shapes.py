"""The few shapes of captured passes."""

import pytest

from lade.model.inputs import STEP_SIZES, batch_bucket, key_bucket, step_bucket


def test_sizes_are_rounded_up_to_the_next_of_a_few():
    found = [step_bucket(size) for size in range(1, 129)]
    assert all(padded >= size for size, padded in enumerate(found, start=1))
    assert sorted(set(found)) == list(STEP_SIZES) and [step_bucket(size) for size in STEP_SIZES] == list(STEP_SIZES)
    assert [step_bucket(size) for size in (129, 256, 257)] == [256, 256, 384]


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16)])
def test_rows_are_rounded_up_to_a_power_of_two(rows, padded):
    assert batch_bucket(rows) == padded


def test_keys_are_rounded_up_to_two_buckets_an_octave():
    found = [key_bucket(tokens) for tokens in range(1, 40_000)]
    assert all(padded >= tokens for tokens, padded in enumerate(found, start=1)) and found == sorted(found)
    assert sorted(set(found))[:7] == [256, 384, 512, 768, 1024, 1536, 2048]
    assert max(padded / tokens for tokens, padded in enumerate(found, start=1) if tokens > 256) < 1.5
    assert all(key_bucket(padded) == padded and padded % 128 == 0 for padded in set(found))
