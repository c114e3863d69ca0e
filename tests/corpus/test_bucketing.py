import itertools
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dflash.corpus.bucketing import bucket_edges, epoch_batches, interleave, make_batches, rank_steps

small_counts = st.lists(st.integers(0, 8), max_size=8)
large_counts = st.lists(st.integers(0, 400), min_size=1, max_size=12)


@st.composite
def nearly_half(draw: st.DrawFn) -> list[int]:
    """Counts around the border at which a bucket has to come twice in a row."""
    rest = draw(st.lists(st.integers(1, 30), min_size=1, max_size=7))
    major = max(1, sum(rest) * draw(st.integers(1, 4)) + draw(st.integers(-2, 3)))
    return draw(st.permutations([major, *rest]))


counts_strategy = small_counts | large_counts | nearly_half()


@given(counts_strategy)
@example([100, 1, 1, 1, 1, 1])
@example([4, 3])
def test_interleaving_visits_each_bucket_as_often_as_it_has_batches(counts: list[int]):
    visits = Counter(interleave(counts))
    assert [visits[i] for i in range(len(counts))] == counts


@given(counts_strategy)
@example([100, 1, 1, 1, 1, 1])
@example([52, 10, 10, 10, 10, 8])
def test_every_prefix_is_within_one_batch_of_proportion(counts: list[int]):
    total, visits = sum(counts), [0] * len(counts)
    for n, bucket in enumerate(interleave(counts), start=1):
        visits[bucket] += 1
        for visited, count in zip(visits, counts, strict=True):
            assert abs(visited * total - n * count) <= total


@given(counts_strategy)
@example([100, 1, 1, 1, 1, 1])
@example([5, 4])
def test_the_longest_run_of_a_bucket_is_minimal(counts: list[int]):
    total = sum(counts)
    for bucket, run in itertools.groupby(interleave(counts)):
        assert len(list(run)) <= math.ceil(counts[bucket] / (total - counts[bucket] + 1))


@given(counts_strategy)
def test_all_buckets_run_out_together(counts: list[int]):
    order = interleave(counts)
    for bucket, count in enumerate(counts):
        if count:
            last = len(order) - order[::-1].index(bucket)
            assert len(order) - last <= len(order) / count  # within its last stride


def partitions(total: int, *, largest: int, parts: int) -> Iterator[list[int]]:
    """Every multiset of at most `parts` positive counts that add up to `total`, descending."""
    if total == 0:
        yield []
    elif parts:
        for first in range(min(total, largest), 0, -1):
            yield from ([first, *rest] for rest in partitions(total - first, largest=first, parts=parts - 1))


@pytest.mark.parametrize("total", range(1, 37))
def test_interleaving_keeps_proportion_and_minimal_runs_for_all_counts(total: int):
    for descending in partitions(total, largest=total, parts=8):
        for counts in (descending, descending[::-1]):  # ties go to the first bucket, so order matters
            order, visits = interleave(counts), np.zeros((total + 1, len(counts)), dtype=int)
            visits[np.arange(1, total + 1), order] = 1
            visits = visits.cumsum(0)
            assert visits[-1].tolist() == counts
            assert (np.abs(visits * total - np.outer(np.arange(total + 1), counts)) <= total).all(), counts
            for bucket, run in itertools.groupby(order):
                assert len(list(run)) <= math.ceil(counts[bucket] / (total - counts[bucket] + 1)), counts


def test_the_longest_bucket_of_a_typical_corpus_comes_at_most_three_times_in_a_row():
    order = interleave([4, 6, 9, 12, 17, 52])
    assert max(len(list(run)) for _, run in itertools.groupby(order)) <= 3


lengths_strategy = st.lists(st.integers(1, 200), min_size=1, max_size=120)
methods = st.sampled_from(["optimal", "quantile"])


def bucket_of(lengths: list[int], edges: list[int]) -> list[int]:
    return np.searchsorted(edges, lengths).tolist()


def padded(lengths: list[int], edges: list[int]) -> int:
    """Tokens where every row is padded to the longest of its bucket."""
    buckets: dict[int, list[int]] = {}
    for length, bucket in zip(lengths, bucket_of(lengths, edges), strict=True):
        buckets.setdefault(bucket, []).append(length)
    return sum(len(bucket) * max(bucket) for bucket in buckets.values())


@given(lengths_strategy, st.integers(1, 8), methods)
def test_buckets_are_ordered_classes_of_which_none_is_empty(lengths: list[int], num_buckets: int, method: str):
    edges = bucket_edges(lengths, num_buckets, method=method)
    buckets = bucket_of(lengths, edges)
    assert len(edges) < num_buckets
    assert edges == sorted(set(edges))
    assert set(buckets) == set(range(len(edges) + 1))
    assert [bucket for _, bucket in sorted(zip(lengths, buckets, strict=True))] == sorted(buckets)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 4))
def test_no_edges_pad_less_than_the_optimal_ones(lengths: list[int], num_buckets: int):
    distinct = sorted(set(lengths))
    num_edges = min(num_buckets, len(distinct)) - 1
    least = min(padded(lengths, list(edges)) for edges in itertools.combinations(distinct[:-1], num_edges))
    assert padded(lengths, bucket_edges(lengths, num_buckets)) == least


@given(lengths_strategy)
def test_a_bucket_for_every_length_pads_nothing(lengths: list[int]):
    assert padded(lengths, bucket_edges(lengths, 200)) == sum(lengths)


def test_six_quantile_buckets_hold_the_same_number_of_distinct_lengths():
    lengths = random.Random(0).sample(range(1, 1000), 600)
    edges = bucket_edges(lengths, 6, method="quantile")
    assert Counter(bucket_of(lengths, edges)) == dict.fromkeys(range(6), 100)


@given(lengths_strategy, st.integers(1, 6), st.integers(200, 900), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_has_each_row_once_in_bounded_batches_of_one_bucket(
    lengths: list[int], num_buckets: int, max_tokens: int, seed: int, epoch: int
):
    buckets = bucket_of(lengths, bucket_edges(lengths, num_buckets))
    batches = epoch_batches(lengths, buckets, max_tokens=max_tokens, seed=seed, epoch=epoch)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len({buckets[row] for row in batch}) == 1
        assert len(batch) * max(lengths[row] for row in batch) <= max_tokens
    assert batches == epoch_batches(lengths, buckets, max_tokens=max_tokens, seed=seed, epoch=epoch)


@st.composite
def epochs(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """The batches of an epoch, and the lengths of its rows."""
    lengths = draw(lengths_strategy)
    buckets = bucket_of(lengths, bucket_edges(lengths, draw(st.integers(1, 6))))
    return epoch_batches(lengths, buckets, max_tokens=draw(st.integers(200, 600)), seed=0, epoch=0), lengths


@given(epochs(), st.integers(1, 5), st.integers(1, 4))
def test_every_rank_has_every_step_and_no_batch_is_lost_or_repeated(
    epoch: tuple[list[list[int]], list[int]], num_ranks: int, accumulation: int
):
    batches, lengths = epoch
    steps = rank_steps(batches, lengths, num_ranks=num_ranks, accumulation=accumulation)
    assert {len(step) for step in steps} == {num_ranks}
    assert {len(micro) for step in steps[:-1] for micro in step} <= {accumulation}
    counts = [len(micro) for micro in steps[-1]]
    assert max(counts) - min(counts) <= 1
    # a step, whoever has its batches, is the next of the order: it mixes buckets in proportion as the order does
    size = num_ranks * accumulation
    dealt = [sorted(batch for micro in step for batch in micro) for step in steps]
    assert dealt == [sorted(batches[i : i + size]) for i in range(0, len(batches), size)]
    assert steps == rank_steps(batches, lengths, num_ranks=num_ranks, accumulation=accumulation)


@given(epochs(), st.integers(2, 5), st.integers(1, 4))
def test_ranks_of_a_step_differ_by_at_most_its_largest_batch(
    epoch: tuple[list[list[int]], list[int]], num_ranks: int, accumulation: int
):
    batches, lengths = epoch
    for step in rank_steps(batches, lengths, num_ranks=num_ranks, accumulation=accumulation):
        costs = [[len(batch) * max(lengths[row] for row in batch) for batch in micro] for micro in step]
        loads = [sum(rank) for rank in costs]
        assert max(loads) - min(loads) <= max(cost for rank in costs for cost in rank)


@given(epochs(), st.integers(1, 4))
def test_one_rank_takes_the_batches_in_order(epoch: tuple[list[list[int]], list[int]], accumulation: int):
    batches, lengths = epoch
    steps = rank_steps(batches, lengths, num_ranks=1, accumulation=accumulation)
    assert [batch for (micro,) in steps for batch in micro] == batches


def test_epochs_and_seeds_shuffle_differently():
    lengths = [10] * 64
    orders = {
        str(epoch_batches(lengths, [0] * 64, max_tokens=40, seed=seed, epoch=epoch))
        for seed, epoch in itertools.product(range(3), repeat=2)
    }
    assert len(orders) == 9


def test_every_order_of_buckets_has_the_same_batches():
    lengths, buckets = [5, 6, 7, 8] * 9, [0, 0, 1, 1] * 9
    orders = {
        order: epoch_batches(lengths, buckets, max_tokens=16, seed=7, epoch=2, order=order)
        for order in ("interleaved", "shuffled", "sequential")
    }
    assert len({str(sorted(batches)) for batches in orders.values()}) == 1
    assert len({str(batches) for batches in orders.values()}) == 3
    visited = [buckets[batch[0]] for batch in orders["sequential"]]
    assert visited == sorted(visited)


def test_the_order_of_an_epoch_is_the_same_in_another_process():
    code = (
        "from dflash.corpus.bucketing import epoch_batches; "
        "print(epoch_batches([5, 6, 7, 8] * 9, [0, 0, 1, 1] * 9, max_tokens=16, seed=7, epoch=2))"
    )
    here = epoch_batches([5, 6, 7, 8] * 9, [0, 0, 1, 1] * 9, max_tokens=16, seed=7, epoch=2)
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == str(here)


def test_a_row_longer_than_a_batch_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="row 1 has 50 tokens, a batch at most 40; raise the tokens per batch to 50"):
        make_batches([0, 1], [10, 50], max_tokens=40, rng=random.Random(0))


def test_bucketing_does_not_load_torch():
    code = "import dflash.corpus.bucketing, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
