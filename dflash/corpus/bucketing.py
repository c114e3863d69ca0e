"""Length buckets, batches within them, and the order in which buckets are visited. Integers in, integers out.

A bucket is a class of rows of similar length, so that padding stays small. Homogeneous runs of the long bucket make
gradients swing, so batches of different buckets are interleaved evenly over the whole epoch.
"""

import random
from bisect import bisect_left
from collections.abc import Sequence


def bucket_edges(lengths: Sequence[int], num_buckets: int) -> list[int]:
    """Inclusive upper bounds of all buckets but the last, which is open: quantiles of `lengths`, strictly ascending.

    Where many rows share a length, quantiles coincide and there are fewer buckets; none is empty on these `lengths`.
    """
    ordered = sorted(lengths)
    quantiles = {ordered[(len(ordered) * i - 1) // num_buckets] for i in range(1, num_buckets)}
    return sorted(quantiles - {ordered[-1]})


def assign(lengths: Sequence[int], edges: Sequence[int]) -> list[int]:
    """Bucket of each length: 0 up to `edges[0]`, `len(edges)` above the last edge."""
    return [bisect_left(edges, length) for length in lengths]


def padded_runs(lengths: Sequence[int], max_tokens: int) -> list[range]:
    """Cut rows, in order, into runs of at most `max_tokens`, padding counted; a longer row is a run of its own."""
    cuts, longest = [0], 0
    for i, length in enumerate(lengths):
        longest = max(longest, length)
        if i > cuts[-1] and longest * (i - cuts[-1] + 1) > max_tokens:
            cuts.append(i)
            longest = length
    return [range(a, b) for a, b in zip(cuts, [*cuts[1:], len(lengths)], strict=True)]


def make_batches(
    rows: Sequence[int], lengths: Sequence[int], *, max_tokens: int, rng: random.Random
) -> list[list[int]]:
    """Shuffle `rows` (indices into `lengths`) and cut them into batches of at most `max_tokens`, padding counted.

    Raises ValueError for a row that alone is longer.
    """
    shuffled = list(rows)
    rng.shuffle(shuffled)
    for row in shuffled:
        if lengths[row] > max_tokens:
            raise ValueError(
                f"row {row} has {lengths[row]} tokens, a batch at most {max_tokens}; "
                f"raise the tokens per batch to {max(lengths)} or lower the longest row"
            )
    return [[shuffled[i] for i in run] for run in padded_runs([lengths[row] for row in shuffled], max_tokens)]


def interleave(counts: Sequence[int]) -> list[int]:
    """The order in which buckets with `counts` batches are visited, as evenly as can be.

    After any n visits of N, bucket i was visited `n * counts[i] / N` times, give or take one; so all buckets run out
    together. A bucket with b batches and r others comes at most `ceil(b / (r + 1))` times in a row, which is minimal.

    Every bucket has a stride N / counts[i], and its j-th visit (from 0) is due between j and j + 1 strides, borders
    rounded outwards: among those that may come, the earliest deadline first (the windows of Pfair scheduling, Baruah
    et al. 1996). A bucket of more than half of all visits is laid out first instead, as equal runs between the others.
    That runs and windows never conflict was checked for all counts up to 24 visits in 8 buckets; it is not proven.
    """
    total, largest = sum(counts), max(counts, default=0)
    others = total - largest
    major = counts.index(largest) if largest > others + 1 else None
    order = [0 if major is None else major] * total
    free = range(1, total + 1) if major is None else [m * (total + 1) // (others + 1) for m in range(1, others + 1)]
    visits = [0] * len(counts)
    for n in free:
        previous = order[n - 2] if n > 1 else None  # never twice in a row: runs belong to a major bucket only
        allowed = [
            i
            for i, count in enumerate(counts)
            if i not in (major, previous) and visits[i] < count and visits[i] * total <= n * count
        ]
        chosen = min(allowed, key=lambda i: (visits[i] + 1) * total / counts[i])
        order[n - 1] = chosen
        visits[chosen] += 1
    return order


def epoch_batches(
    lengths: Sequence[int], buckets: Sequence[int], *, max_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """All batches of an epoch in the order of training: row numbers, each exactly once, every batch of one bucket.

    The same (seed, epoch) gives the same batches; their number may differ a little from epoch to epoch.
    """
    names = sorted(set(buckets))
    rows: dict[int, list[int]] = {name: [] for name in names}
    for row, bucket in enumerate(buckets):
        rows[bucket].append(row)
    batches = [
        make_batches(rows[name], lengths, max_tokens=max_tokens, rng=random.Random(f"{seed}/{epoch}/{name}"))
        for name in names
    ]
    queues = [iter(queue) for queue in batches]
    return [next(queues[i]) for i in interleave([len(queue) for queue in batches])]
