import itertools
import math
import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dflash.corpus.bucketing import assign, bucket_edges, epoch_batches, interleave, make_batches

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


def test_interleaving_holds_for_all_small_counts():
    for counts in itertools.product(range(6), repeat=4):
        order, total = interleave(counts), sum(counts)
        assert all(order.count(i) == count for i, count in enumerate(counts))
        for bucket, run in itertools.groupby(order):
            assert len(list(run)) <= math.ceil(counts[bucket] / (total - counts[bucket] + 1))


lengths_strategy = st.lists(st.integers(1, 200), min_size=1, max_size=120)


@given(lengths_strategy, st.integers(1, 8))
def test_buckets_are_ordered_classes_of_which_none_is_empty(lengths: list[int], num_buckets: int):
    edges = bucket_edges(lengths, num_buckets)
    buckets = assign(lengths, edges)
    assert len(edges) < num_buckets
    assert edges == sorted(set(edges))
    assert set(buckets) == set(range(len(edges) + 1))
    assert [bucket for _, bucket in sorted(zip(lengths, buckets, strict=True))] == sorted(buckets)


def test_six_quantile_buckets_hold_the_same_number_of_distinct_lengths():
    lengths = random.Random(0).sample(range(1, 1000), 600)
    assert Counter(assign(lengths, bucket_edges(lengths, 6))) == dict.fromkeys(range(6), 100)


def test_a_length_beyond_all_seen_belongs_to_the_last_bucket():
    assert assign([1, 10, 11, 9999], [10, 20]) == [0, 0, 1, 2]


@given(lengths_strategy, st.integers(1, 6), st.integers(200, 900), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_has_each_row_once_in_bounded_batches_of_one_bucket(
    lengths: list[int], num_buckets: int, max_tokens: int, seed: int, epoch: int
):
    buckets = assign(lengths, bucket_edges(lengths, num_buckets))
    batches = epoch_batches(lengths, buckets, max_tokens=max_tokens, seed=seed, epoch=epoch)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len({buckets[row] for row in batch}) == 1
        assert len(batch) * max(lengths[row] for row in batch) <= max_tokens
    assert batches == epoch_batches(lengths, buckets, max_tokens=max_tokens, seed=seed, epoch=epoch)


def test_epochs_and_seeds_shuffle_differently():
    lengths = [10] * 64
    orders = {
        str(epoch_batches(lengths, [0] * 64, max_tokens=40, seed=seed, epoch=epoch))
        for seed, epoch in itertools.product(range(3), repeat=2)
    }
    assert len(orders) == 9


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


def test_bucketing_and_conversations_do_not_load_torch():
    code = "import dflash.corpus.bucketing, dflash.corpus.conversations, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
