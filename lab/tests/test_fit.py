"""Known laws, with and without noise on them, are found again."""

import math

import numpy as np
import pytest

from lade_lab.scaling_law import expected, fit_expectation, fit_line

SIZES = [(ngram, b) for ngram in range(3, 8) for b in (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 60)]


def law(alpha, f, noise=0.0, seed=0):
    generator = np.random.default_rng(seed)
    rates = ((f - 1 + expected(alpha, ngram, b)) / f + noise * generator.normal() for ngram, b in SIZES)
    return [(ngram, b, rate) for (ngram, b), rate in zip(SIZES, rates, strict=True)]


def test_one_candidate_accepts_as_a_chain():
    """With b = 1: 1 for the bonus token, α for a first guess that is right, α² for a second one behind it, ..."""
    assert expected(0.5, 4, 1) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert (expected(0.0, 5, 7), expected(1.0, 5, 7)) == (1.0, 5.0), "several that are never or always right"


def test_many_candidates_are_simulated():
    """Place i is reached if any of b candidates is right in its first i tokens, as the paper counts it."""
    generator = np.random.default_rng(1)
    right = generator.random((40_000, 3, 4)) < 0.6  # [trials, b, γ]
    reached = right.cumprod(axis=2).any(axis=1).sum(axis=1)
    assert expected(0.6, 5, 3) == pytest.approx(1 + reached.mean(), abs=0.03)


@pytest.mark.parametrize(("alpha", "f"), [(0.1013, 1.0), (0.4237, 3.1), (0.7, 1.5), (0.8991, 8.0)])
def test_the_parameters_are_found_exactly_without_noise(alpha, f):
    found = fit_expectation(law(alpha, f))
    assert (found.alpha, found.f) == (pytest.approx(alpha, abs=1e-8), pytest.approx(f, rel=1e-6))
    assert found.rms <= found.worst < 1e-7 and found.points == len(SIZES)
    assert found.tokens_per_step(5, 7) == pytest.approx((f - 1 + expected(alpha, 5, 7)) / f, abs=1e-5)


@pytest.mark.parametrize(("alpha", "f"), [(0.3, 2.0), (0.425, 3.1), (0.7, 1.5)])
def test_the_parameters_are_found_through_noise(alpha, f):
    for seed in range(5):
        found = fit_expectation(law(alpha, f, noise=0.02, seed=seed))
        assert found.alpha == pytest.approx(alpha, abs=0.03) and found.f == pytest.approx(f, rel=0.1)
        assert found.rms == pytest.approx(0.02, rel=0.35), "what is left is the noise"
        assert found.rms < found.worst < 5 * 0.02


def test_no_other_parameters_fit_better():
    points = law(0.5, 2.0, noise=0.1, seed=3)
    found = fit_expectation(points)
    for alpha in np.linspace(0.01, 0.99, 99):
        for f in (1.0, 1.5, found.f * 0.97, found.f, found.f * 1.03, 4.0):
            errors = [(f - 1 + expected(alpha, n, b)) / f - rate for n, b, rate in points]
            assert math.sqrt(sum(error**2 for error in errors) / len(errors)) >= found.rms - 1e-9


def test_guesses_that_never_help_and_steps_better_than_the_formula_allows():
    found = fit_expectation([(ngram, b, 1.0) for ngram, b in SIZES])
    assert found.tokens_per_step(5, 7) == pytest.approx(1.0) and found.rms == pytest.approx(0.0, abs=1e-9)
    found = fit_expectation([(3, 1, 3.2), (4, 1, 4.3), (5, 1, 5.4)])
    assert found.f == 1.0 and found.alpha == pytest.approx(1.0)


def test_two_sizes_would_fit_anyhow():
    points = [(5, 7, 1.8), (5, 7, 1.9), (4, 7, 1.7)]
    assert fit_expectation(points) is None
    assert fit_expectation([*points, (4, 5, 1.6)]).points == 4


def test_a_line_is_found_again_but_not_through_too_little():
    generator = np.random.default_rng(0)
    fed = [2.0, 5.0, 9.0, 20.0, 47.0, 100.0, 230.0]
    exact = fit_line(fed, [0.8 + 0.3 * math.log2(t) for t in fed])
    assert (exact.intercept, exact.slope, exact.r_squared) == pytest.approx((0.8, 0.3, 1.0))
    assert exact.points == 7 and exact.tokens_per_step(64) == pytest.approx(0.8 + 0.3 * 6)
    noisy = fit_line(fed, [0.8 + 0.3 * math.log2(t) + 0.05 * generator.normal() for t in fed])
    assert noisy.slope == pytest.approx(0.3, abs=0.05) and 0.95 < noisy.r_squared < 1.0
    a, b = np.polynomial.Polynomial.fit(np.log2(fed), [1.0, 2, 2, 3, 1, 4, 2], 1).convert().coef
    other = fit_line(fed, [1.0, 2, 2, 3, 1, 4, 2])
    assert (other.intercept, other.slope) == pytest.approx((a, b))
    assert other.r_squared == pytest.approx(np.corrcoef(np.log2(fed), [1.0, 2, 2, 3, 1, 4, 2])[0, 1] ** 2)
    assert fit_line([5.0], [1.5]) is None and fit_line([5.0, 5.0], [1.5, 1.6]) is None
    assert fit_line([2.0, 4.0], [1.5, 1.5]).r_squared == 1.0
