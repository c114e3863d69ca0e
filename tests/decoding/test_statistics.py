"""The bootstrap: what an interval promises, and what must not change it."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.decoding import statistics
from dflash.decoding.statistics import Paired, resampled_sums, student_quantile, tau_intervals

# (accepted, rounds) of responses
sums = st.lists(
    st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(0, 15 * n), st.just(n))), min_size=2, max_size=20
)


def interval(responses: Sequence[tuple[int, int]], *, turns: int = 1, seed: int = 0) -> tuple[float, float]:
    """Of conversations of so many turns, one after the other."""
    conversations = [number // turns for number in range(len(responses))]
    found = tau_intervals(
        [[a] for a, _ in responses], [[n] for _, n in responses], conversations_R=conversations, seed=seed
    )
    assert found
    return found[0]


def paired_difference(
    first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]], *, turns: int = 1, seed: int = 0
) -> Paired | None:
    conversations = [number // turns for number in range(len(first))]
    return statistics.paired_difference(first, second, conversations_R=conversations, seed=seed)


def answered(generator: np.random.Generator, *, conversations: int, turns: int) -> list[tuple[int, int]]:
    """Turns of a conversation are as easy as each other; they differ in length, and E[accepted] / E[rounds] is 2."""
    rounds = generator.integers(5, 60, size=conversations * turns)
    ease = generator.gamma(4, 0.5, size=conversations).repeat(turns)
    return list(zip(np.asarray(generator.poisson(rounds * ease)).tolist(), rounds.tolist(), strict=True))


@pytest.mark.parametrize(("conversations", "turns"), [(60, 1), (8, 1), (20, 4)])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(conversations: int, turns: int) -> None:
    generator = np.random.default_rng(0)
    sets = 400
    covered = 0
    for seed in range(sets):
        low, high = interval(answered(generator, conversations=conversations, turns=turns), turns=turns, seed=seed)
        covered += low <= 1 + 2 <= high
    assert 0.90 <= covered / sets <= 0.98


def test_turns_of_one_conversation_are_not_as_many_conversations() -> None:
    generator = np.random.default_rng(0)
    responses = answered(generator, conversations=20, turns=4)
    (low, high), (lower, higher) = interval(responses), interval(responses, turns=4)
    assert higher - lower > 1.5 * (high - low)  # 4 times as many independent ones would halve it
    sums = np.reshape(responses, (20, 4, 2)).sum(1)
    assert (lower, higher) == interval([(a, n) for a, n in sums.tolist()]), "a conversation counts by its sums"


def test_few_conversations_need_wider_percentiles() -> None:
    assert [round(student_quantile(n), 2) for n in (4, 7, 20, 1000)] == [2.77, 2.36, 2.09, 1.96]
    values = np.random.default_rng(0).normal(size=100_000)
    for drawn, expected in ((None, 1.96), (10, 2.262 * (10 / 9) ** 0.5), (500, 1.967)):
        low, high = statistics.percentile_interval(values, num_drawn=drawn)
        assert [-low, high] == pytest.approx([expected, expected], abs=0.04)


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


def test_without_two_conversations_there_is_no_interval() -> None:
    assert tau_intervals([[3, 4]], [[2, 1]], conversations_R=["a"], seed=0) is None
    assert tau_intervals([[3], [0]], [[2], [0]], conversations_R=["a", "b"], seed=0) is None
    assert tau_intervals([[3], [4]], [[2], [2]], conversations_R=["a", "a"], seed=0) is None
    assert tau_intervals([], [], conversations_R=[], seed=0) is None


def test_methods_are_resampled_together_and_each_gets_its_own_interval() -> None:
    accepted = [[3, 5], [1, 9], [4, 4]]
    rounds = [[3, 2], [2, 3], [5, 4]]
    both = tau_intervals(accepted, rounds, conversations_R=range(3), seed=0)
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
    one, other = paired_difference(first, second), paired_difference(second, first)
    assert one
    assert other
    assert one.interval
    assert other.interval
    assert (one.first, one.second, one.difference) == (other.second, other.first, -other.difference)
    assert one.interval == pytest.approx((-other.interval[1], -other.interval[0]))


@given(sums)
def test_a_drafter_does_not_differ_from_itself(responses: list[tuple[int, int]]) -> None:
    paired = paired_difference(responses, responses)
    assert paired
    assert (paired.difference, paired.interval) == (0, (0, 0))


def test_pairing_cancels_how_hard_responses_are() -> None:
    generator = np.random.default_rng(0)
    hard = generator.integers(0, 100, size=40)
    first, second = [(int(h) + 1, 10) for h in hard], [(int(h), 10) for h in hard]
    paired = paired_difference(first, second)
    assert paired
    assert paired.interval == pytest.approx((0.1, 0.1))  # 1 of 10 rounds more in each
    low, high = interval(first)
    assert high - low > 1  # what an unpaired test would have to see through


@pytest.mark.parametrize(("conversations", "turns"), [(40, 1), (8, 1), (12, 4)])
def test_the_paired_test_seldom_finds_a_difference_where_there_is_none(conversations: int, turns: int) -> None:
    generator = np.random.default_rng(0)
    sets = 400
    found = 0
    for seed in range(sets):
        rounds = generator.integers(5, 60, size=conversations * turns)
        ease = generator.gamma(4, 0.5, size=conversations)
        # each drafter has conversations that it is good at
        eases = [(ease * generator.lognormal(0, 0.3, size=conversations)).repeat(turns) for _ in range(2)]
        first, second = (
            list(zip(np.asarray(generator.poisson(rounds * one)).tolist(), rounds.tolist(), strict=True))
            for one in eases
        )
        paired = paired_difference(first, second, turns=turns, seed=seed)
        assert paired
        assert paired.conversations == conversations
        assert paired.interval
        found += not paired.interval[0] <= 0 <= paired.interval[1]
    assert found / sets <= 0.10


def test_one_pair_has_a_difference_and_no_interval_and_none_has_nothing() -> None:
    paired = paired_difference([(4, 2)], [(2, 2)])
    assert paired
    assert (paired.difference, paired.interval) == (1, None)
    assert paired_difference([(0, 0)], [(0, 0)]) is None
