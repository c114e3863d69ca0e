"""The bootstrap over responses: how far a ratio of sums would move with other responses. Knows no method, no report.

Rounds of one response depend on each other, responses do not: so whole responses are drawn, with replacement, as many
as there are, and the sums are taken again. The 2.5 and 97.5 percentiles of what comes out are the interval (percentile
bootstrap, Efron 1979). With few responses it is too narrow; with one there is none.

R responses, B resamples, C columns
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_RESAMPLES = 2000
COVERAGE = 0.95
DRAWS_PER_PASS = 2**22  # 32 MB of float64

Interval = tuple[float, float]


def resampled_sums(values_RC: ArrayLike, *, seed: int, num_resamples: int = NUM_RESAMPLES) -> NDArray[np.float64]:
    """The column sums of each resample (B, C). All columns of a resample are sums over the same draw of responses."""
    values_RC = np.asarray(values_RC, dtype=np.float64)
    num_responses = len(values_RC)
    generator = np.random.default_rng(seed)
    per_pass = max(1, DRAWS_PER_PASS // num_responses)
    parts = []
    for start in range(0, num_resamples, per_pass):
        size = min(per_pass, num_resamples - start)
        # how often each response was drawn: the draw of resample b counts in bins b * R .. b * R + R - 1
        drawn_BR = generator.integers(num_responses, size=(size, num_responses))
        drawn_BR += np.arange(size)[:, None] * num_responses
        times_BR = np.bincount(drawn_BR.ravel(), minlength=size * num_responses).reshape(size, num_responses)
        parts.append(times_BR @ values_RC)
    return np.concatenate(parts)


def percentile_interval(values_B: NDArray[np.float64]) -> Interval:
    tail = 50 * (1 - COVERAGE)
    low, high = np.percentile(values_B, [tail, 100 - tail])
    return float(low), float(high)


def tau_intervals(
    accepted_RM: Sequence[Sequence[int]], rounds_RM: Sequence[Sequence[int]], *, seed: int
) -> list[Interval] | None:
    """The interval of 1 + accepted / rounds of each of M methods, from each response's sums.

    Responses without a round say nothing and are left out; with fewer than two others there is no interval: None.
    """
    accepted, rounds = np.atleast_2d(accepted_RM), np.atleast_2d(rounds_RM)
    if not rounds.size:
        return None
    some_R = rounds.any(axis=1)
    if some_R.sum() < 2:
        return None
    sums_BC = resampled_sums(np.hstack([accepted[some_R], rounds[some_R]]), seed=seed)
    accepted_BM, rounds_BM = np.split(sums_BC, 2, axis=1)
    return [percentile_interval(tau_B) for tau_B in (1 + accepted_BM / rounds_BM).T]


@dataclass(frozen=True)
class Paired:
    """tau of two drafters on the same responses; `interval` is of the difference, None with fewer than two of them."""

    first: float
    second: float
    difference: float
    interval: Interval | None


def paired_difference(
    first_R2: Sequence[tuple[int, int]], second_R2: Sequence[tuple[int, int]], *, seed: int
) -> Paired | None:
    """Compare two drafters by (accepted, rounds) of the same responses, in the same order; None without any round.

    Each resample draws the same responses for both: how hard they are cancels out of the difference.
    """
    both_RC = [(*a, *b) for a, b in zip(first_R2, second_R2, strict=True) if a[1] and b[1]]
    if not both_RC:
        return None

    def taus(sums_BC: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return 1 + sums_BC[:, 0] / sums_BC[:, 1], 1 + sums_BC[:, 2] / sums_BC[:, 3]

    first, second = (float(tau[0]) for tau in taus(np.sum(both_RC, axis=0, dtype=np.float64, keepdims=True)))
    interval = None
    if len(both_RC) > 1:
        first_B, second_B = taus(resampled_sums(both_RC, seed=seed))
        interval = percentile_interval(first_B - second_B)
    return Paired(first=first, second=second, difference=first - second, interval=interval)
