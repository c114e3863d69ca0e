"""The bootstrap: what an interval promises, and what must not change it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.decoding import statistics
from dflash.decoding.statistics import paired_difference, resampled_sums, tau_intervals

# (accepted, rounds) of responses
sums = st.lists(
    st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(0, 15 * n), st.just(n))), min_size=2, max_size=20
)


def interval(responses: list[tuple[int, int]], *, seed: int = 0) -> tuple[float, float]:
    found = tau_intervals([[a] for a, _ in responses], [[n] for _, n in responses], seed=seed)
    assert found
    return found[0]


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    truth, covered, sets = 1 + 2.0, 0, 300
    for seed in range(sets):
        # responses differ in length and in how well they are drafted; E[accepted] / E[rounds] is 2
        rounds = generator.integers(5, 60, size=60)
        accepted = generator.poisson(rounds * generator.gamma(4, 0.5, size=60))
        low, high = interval(list(zip(accepted.tolist(), rounds.tolist(), strict=True)), seed=seed)
        covered += low <= truth <= high
    assert 0.90 <= covered / sets <= 0.98


@given(sums)
def test_an_interval_lies_within_the_responses_own_lengths(responses: list[tuple[int, int]]) -> None:
    low, high = interval(responses)
    lengths = [1 + accepted / rounds for accepted, rounds in responses]
    assert min(lengths) - 1e-9 <= low <= high <= max(lengths) + 1e-9


@given(sums, st.integers(2, 5))
def test_an_interval_follows_scale_and_shift(responses: list[tuple[int, int]], by: int) -> None:
    low, high = interval(responses)
    assert interval([(a * by, n * by) for a, n in responses]) == pytest.approx((low, high))  # longer responses
    assert interval([(a + by * n, n) for a, n in responses]) == pytest.approx((low + by, high + by))  # each round more
    assert interval(responses) == (low, high)  # the seed decides


@given(sums)
def test_responses_without_rounds_change_nothing(responses: list[tuple[int, int]]) -> None:
    assert interval([(0, 0), *responses, (0, 0)]) == interval(responses)


def test_more_responses_give_a_narrower_interval() -> None:
    few = [(10 * (i % 2), 10) for i in range(20)]
    (low, high), (lower, higher) = interval(few * 25), interval(few)
    assert (higher - lower) / 6 < high - low < (higher - lower) / 4  # by the root of 25


def test_without_two_responses_there_is_no_interval() -> None:
    assert tau_intervals([[3, 4]], [[2, 1]], seed=0) is None
    assert tau_intervals([[3], [0]], [[2], [0]], seed=0) is None
    assert tau_intervals([], [], seed=0) is None


def test_methods_are_resampled_together_and_each_gets_its_own_interval() -> None:
    accepted = [[3, 5], [1, 9], [4, 4]]
    rounds = [[3, 2], [2, 3], [5, 4]]
    both = tau_intervals(accepted, rounds, seed=0)
    assert both == [interval([(a[i], n[i]) for a, n in zip(accepted, rounds, strict=True)]) for i in (0, 1)]


def test_resamples_draw_as_many_responses_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [[1, 10], [1, 20], [1, 30]]
    at_once = resampled_sums(values, seed=0, num_resamples=500)
    assert (at_once[:, 0] == 3).all()
    assert at_once[:, 1].mean() == pytest.approx(60, abs=2)
    assert at_once[:, 1].min() >= 30
    assert at_once[:, 1].max() <= 90
    monkeypatch.setattr(statistics, "DRAWS_PER_PASS", 7)
    np.testing.assert_array_equal(resampled_sums(values, seed=0, num_resamples=500), at_once)


@given(sums)
def test_the_paired_difference_is_symmetric(first: list[tuple[int, int]]) -> None:
    second = [(a // 2, n) for a, n in first[::-1]]
    one, other = paired_difference(first, second, seed=0), paired_difference(second, first, seed=0)
    assert one
    assert other
    assert one.interval
    assert other.interval
    assert (one.first, one.second, one.difference) == (other.second, other.first, -other.difference)
    assert one.interval == pytest.approx((-other.interval[1], -other.interval[0]))


@given(sums)
def test_a_drafter_does_not_differ_from_itself(responses: list[tuple[int, int]]) -> None:
    paired = paired_difference(responses, responses, seed=0)
    assert paired
    assert (paired.difference, paired.interval) == (0, (0, 0))


def test_pairing_cancels_how_hard_responses_are() -> None:
    generator = np.random.default_rng(0)
    hard = generator.integers(0, 100, size=40)
    first, second = [(int(h) + 1, 10) for h in hard], [(int(h), 10) for h in hard]
    paired = paired_difference(first, second, seed=0)
    assert paired
    assert paired.interval == pytest.approx((0.1, 0.1))  # 1 of 10 rounds more in each
    low, high = interval(first)
    assert high - low > 1  # what an unpaired test would have to see through


def test_the_paired_test_seldom_finds_a_difference_where_there_is_none() -> None:
    generator = np.random.default_rng(0)
    found = 0
    for seed in range(300):
        rounds = generator.integers(5, 60, size=40)
        skill = generator.gamma(4, 0.5, size=40)
        first, second = (
            list(zip(generator.poisson(rounds * skill).tolist(), rounds.tolist(), strict=True)) for _ in range(2)
        )
        paired = paired_difference(first, second, seed=seed)
        assert paired
        assert paired.interval
        found += not paired.interval[0] <= 0 <= paired.interval[1]
    assert found / 300 <= 0.10


def test_one_pair_has_a_difference_and_no_interval_and_none_has_nothing() -> None:
    paired = paired_difference([(4, 2)], [(2, 2)], seed=0)
    assert paired
    assert (paired.difference, paired.interval) == (1, None)
    assert paired_difference([(0, 0)], [(0, 0)], seed=0) is None
