"""Drift: whether a drafter does worse on new prompts than on its evaluation set. Reports in; knows no model, no file.

Both are acceptance lengths of one drafter on different responses, so that nothing can be paired. The interval of their
difference is recovered from the intervals of the two (MOVER, Zou and Donner 2008, for independent estimates):

    low  = d - sqrt((new - low of new)^2 + (high of known - known)^2)      d = new - known
    high = d + sqrt((high of new - new)^2 + (known - low of known)^2)

    due       the whole interval lies below 0, and the drop is at least the largest that is tolerated
    not due   otherwise: the reason says whether the drop is too small or too uncertain
    unknown   one of the two has too few responses for an interval, or was evaluated in another way
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot
from typing import Any, Literal

from dflash.decoding.statistics import Interval


@dataclass(frozen=True)
class Drift:
    """Whether retraining is due, and why. `known`, `new`: acceptance lengths; `interval` is of new - known."""

    retraining: Literal["due", "not due", "unknown"]
    reason: str
    method: str
    known: float | None = None
    new: float | None = None
    interval: Interval | None = None


def drift(
    known: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    method: str,
    largest_drop: float,
    minimum_conversations: int,
) -> Drift:
    """Compare the reports of one drafter on its evaluation set and on new prompts.

    `largest_drop`: the share of the acceptance length beyond 1 that may be lost, as it is what the drafter adds.
    """
    for name in ("drafter", "schema_version", "conditions"):
        if known[name] != new[name]:
            return Drift("unknown", f"{name} {known[name]} and {new[name]}; evaluate both in the same way", method)
    fewest = min(report["overall"]["conversations"] for report in (known, new))
    if fewest < minimum_conversations:
        few = f"{fewest} conversations are too few for a trustworthy interval; give {minimum_conversations} or more"
        return Drift("unknown", few, method)
    first, second = (report["overall"]["acceptance_length"].get(method) for report in (known, new))
    intervals = [report["overall"]["interval"].get(method) for report in (known, new)]
    if None in (first, second, *intervals):
        return Drift("unknown", f"{method}: too few responses for an interval; give more prompts", method)
    (low_known, high_known), (low_new, high_new) = intervals
    difference = second - first
    low = difference - hypot(second - low_new, high_known - first)
    high = difference + hypot(high_new - second, first - low_known)
    share = -difference / (first - 1) if first > 1 else 0.0
    facts = (
        f"{second:.3f} on new prompts, {first:.3f} on the evaluation set, {difference:+.3f} ({low:+.3f} to {high:+.3f})"
    )
    if high >= 0:
        return Drift("not due", f"{facts}: the interval is not below 0", method, first, second, (low, high))
    if share < largest_drop:
        reason = f"{facts}: a drop of {share:.0%}, below {largest_drop:.0%}"
        return Drift("not due", reason, method, first, second, (low, high))
    reason = f"{facts}: {share:.0%} of what the drafter adds is lost"
    return Drift("due", reason, method, first, second, (low, high))
