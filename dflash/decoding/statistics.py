"""The bootstrap over conversations: how far a ratio of sums would move with others. Knows no method, no report.

Rounds of one response depend on each other, and so do the answers of one conversation; conversations do not. So whole
conversations are drawn, with replacement, as many as there are, and the sums are taken again. The interval is between
two percentiles of what comes out (Efron 1979). Those at 2.5 and 97.5 make one that is too narrow for few conversations:
the resamples vary by the root of (G - 1) / G too little, and have a normal distribution's tails where Student's are
due. Both are mended by percentiles further out (the expanded percentile interval, Hesterberg 2015, section 4.3). How
skewed the conversations are it cannot know, so of very few it is still too narrow; of one there is none.

R responses, G conversations, B resamples, C columns
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

SEED = 0  # of every bootstrap
NUM_RESAMPLES = 2000
COVERAGE = 0.95
DRAWS_PER_PASS = 2**22  # 32 MB of float64

Interval = tuple[float, float]


def sums_of_conversations(values_RC: ArrayLike, conversations_R: Sequence[Hashable]) -> NDArray[np.float64]:
    """The sums of each conversation's responses (G, C), in the order in which conversations appear."""
    numbers: dict[Hashable, int] = {}
    number_R = [numbers.setdefault(conversation, len(numbers)) for conversation in conversations_R]
    values_RC = np.asarray(values_RC, dtype=np.float64).reshape(len(number_R), -1)
    sums_GC = np.zeros((len(numbers), values_RC.shape[1]))
    np.add.at(sums_GC, number_R, values_RC)
    return sums_GC


def resampled_sums(values_GC: ArrayLike, *, seed: int, num_resamples: int = NUM_RESAMPLES) -> NDArray[np.float64]:
    """The column sums of each resample (B, C). All columns of a resample are sums over the same draw of rows."""
    values_GC = np.asarray(values_GC, dtype=np.float64)
    num_rows = len(values_GC)
    generator = np.random.default_rng(seed)
    per_pass = max(1, DRAWS_PER_PASS // num_rows)
    parts = []
    for start in range(0, num_resamples, per_pass):
        size = min(per_pass, num_resamples - start)
        # how often each row was drawn: the draw of resample b counts in bins b * G .. b * G + G - 1
        drawn_BG = generator.integers(num_rows, size=(size, num_rows))
        drawn_BG += np.arange(size)[:, None] * num_rows
        times_BG = np.bincount(drawn_BG.ravel(), minlength=size * num_rows).reshape(size, num_rows)
        parts.append(times_BG @ values_GC)
    return np.concatenate(parts)


def student_quantile(degrees: int) -> float:
    """What Student's t of so many degrees of freedom is below of, but for the upper tail.

    By Fisher and Cornish's expansion around the normal quantile (Abramowitz and Stegun, 26.7.5): off by 0.3 % at 4
    degrees, and by less beyond.
    """
    z, n = NormalDist().inv_cdf((1 + COVERAGE) / 2), degrees
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def percentile_interval(values_B: NDArray[np.float64], *, num_drawn: int | None = None) -> Interval:
    """The interval of what was computed from each resample of `num_drawn` (>= 2) rows; None: of so many that it does
    not matter how many.
    """
    further = NormalDist().inv_cdf((1 + COVERAGE) / 2)
    if num_drawn:
        further = student_quantile(num_drawn - 1) * math.sqrt(num_drawn / (num_drawn - 1))
    tail = 100 * NormalDist().cdf(-further)
    low, high = np.percentile(values_B, [tail, 100 - tail])
    return float(low), float(high)


def tau_intervals(
    accepted_RM: Sequence[Sequence[float]],
    rounds_RM: Sequence[Sequence[float]],
    *,
    conversations_R: Sequence[Hashable],
    seed: int,
) -> list[Interval] | None:
    """The interval of 1 + accepted / rounds of each of M methods, from each response's sums and its conversation.

    Conversations without a round say nothing and are left out; with fewer than two others there is no interval: None.
    """
    if not len(conversations_R):
        return None
    sums_GC = sums_of_conversations(np.hstack([accepted_RM, rounds_RM]), conversations_R)
    some_GC = sums_GC[sums_GC[:, sums_GC.shape[1] // 2 :].any(axis=1)]
    if len(some_GC) < 2:
        return None
    accepted_BM, rounds_BM = np.split(resampled_sums(some_GC, seed=seed), 2, axis=1)
    taus_MB = (1 + accepted_BM / rounds_BM).T
    return [percentile_interval(tau_B, num_drawn=len(some_GC)) for tau_B in taus_MB]


@dataclass(frozen=True)
class Paired:
    """tau of two drafters on the same responses, which are of so many conversations with rounds; `interval` is of the
    difference, None with fewer than two of them.
    """

    first: float
    second: float
    difference: float
    conversations: int
    interval: Interval | None


def paired_difference(
    first_R2: Sequence[tuple[int, int]],
    second_R2: Sequence[tuple[int, int]],
    *,
    conversations_R: Sequence[Hashable],
    seed: int,
) -> Paired | None:
    """Compare two drafters by (accepted, rounds) of the same responses, in the same order; None without any round.

    Each resample draws the same conversations for both: how hard they are cancels out of the difference.
    """
    both_RC = [(*a, *b) for a, b in zip(first_R2, second_R2, strict=True)]
    if not any(row[1] and row[3] for row in both_RC):
        return None
    sums_GC = sums_of_conversations(both_RC, conversations_R)
    sums_GC = sums_GC[(sums_GC[:, 1::2] > 0).all(axis=1)]

    def taus(sums_BC: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return 1 + sums_BC[:, 0] / sums_BC[:, 1], 1 + sums_BC[:, 2] / sums_BC[:, 3]

    first, second = (float(tau[0]) for tau in taus(sums_GC.sum(axis=0, keepdims=True)))
    interval = None
    if len(sums_GC) > 1:
        first_B, second_B = taus(resampled_sums(sums_GC, seed=seed))
        interval = percentile_interval(first_B - second_B, num_drawn=len(sums_GC))
    return Paired(first, second, first - second, len(sums_GC), interval)
