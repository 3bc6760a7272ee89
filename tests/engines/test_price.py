"""The price of a token, by passes of made-up engines."""

import random

import pytest

from lade.engines.price import TokenPrice


def observed(seconds_of, sizes, emitted_of=lambda fed: fed // 4 + 1):
    price = TokenPrice()
    for fed in sizes:
        price.observe(fed, emitted_of(fed), seconds_of(fed))
    return price


def sizes(low, high, count=300):
    draw = random.Random(0)
    return [draw.randint(low, high) for _ in range(count)]


def test_tokens_are_nearly_free_before_anything_is_known_and_where_passes_take_the_same_time():
    price = observed(lambda fed: 0.02, sizes(8, 128))
    assert price.value < 0.01
    assert 0.0 < TokenPrice().value < 0.01
    fixed = TokenPrice(0.25)
    fixed.observe(10, 2, 1.0)
    assert fixed.value == 0.25


@pytest.mark.parametrize("slope", [1e-4, 1e-3])
def test_it_is_the_time_of_a_token_times_the_rate_of_emission(slope):
    batch, fed = 16, sizes(32, 160)
    price = observed(lambda n: 0.02 + slope * n, fed, lambda n: batch + n // 10)
    rate = sum(batch + n // 10 for n in fed) / sum(0.02 + slope * n for n in fed)
    assert price.value == pytest.approx(min(slope * rate, 1.0), rel=0.25)


def test_it_follows_an_engine_that_becomes_slower_and_not_a_single_pass_that_was_delayed():
    price = observed(lambda fed: 0.02 + 1e-5 * fed, sizes(8, 64))
    before = price.value
    for fed in sizes(8, 64):
        price.observe(fed, fed // 4 + 1, 0.02 + 1e-3 * fed)
    assert price.value > 10 * before
    price = observed(lambda fed: 0.02 + 1e-4 * fed, sizes(8, 64))
    before = price.value
    price.observe(60, 16, 5.0)
    assert price.value < 3 * before
