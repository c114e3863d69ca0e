"""Acceptance: its one definition, as sums and counts. Numbers in, numbers out: no tensor, no model, no file.

A response is n tokens. The verifier's prefill gives the first one. A round starts from the last committed token (the
anchor): the drafter proposes the slots after it, the verifier accepts the leading ones that are its own choice and adds
one token of its own, the bonus token, which is the next anchor. There are rounds for as long as a token is missing.

    tau = 1 + accepted / rounds      over all rounds of a set: the 1 is the bonus token

At the end of the response (its end-of-sequence token, or the length limit) a round is cut: accepted tokens beyond the
end are not counted, and the last round has no bonus token where its accepted tokens reach the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import NamedTuple

CHAIN = "chain"
USUAL_BUDGET = 64  # around which trees pay on most machines


def method_name(budget: int) -> str:
    """How the tree of a budget is called in metrics and reports: tree16."""
    return f"tree{budget}"


def num_nodes(method: str, *, num_slots: int) -> int:
    """How many drafted tokens a round of a method has verified, at most."""
    return num_slots if method == CHAIN else int(method.removeprefix("tree"))


def usual_budget(budgets: Sequence[int]) -> int:
    """The largest up to 64, else the smallest: whose tree is decoded live, and compared by unless another is asked."""
    return max((budget for budget in budgets if budget <= USUAL_BUDGET), default=min(budgets))


def cut(accepted: int, *, remaining: int) -> tuple[int, int]:
    """(accepted, committed) of a round when the response has `remaining` tokens to come, the bonus token among them.

    The one rule for the end of a response, in replay and in live decoding.
    """
    return min(accepted, remaining), min(accepted + 1, remaining)


def walk_rounds(accepted_at: Sequence[int], *, num_tokens: int) -> list[int]:
    """The accepted counts of the rounds of a response; `accepted_at[i]` is what a round from token i would accept."""
    rounds = []
    anchor = 0
    while anchor < num_tokens - 1:
        accepted, committed = cut(accepted_at[anchor], remaining=num_tokens - 1 - anchor)
        rounds.append(accepted)
        anchor += committed
    return rounds


def anchors(accepted: Sequence[int], *, num_tokens: int) -> list[int]:
    """The token that each round of a response starts from, counted from the response's first."""
    found = list(accumulate((count + 1 for count in accepted), initial=0))  # only the last round is ever cut
    left = num_tokens - 1 - found.pop()
    assert left in (-1, 0), f"{left} tokens are left after the last round"
    return found


@dataclass(frozen=True)
class Acceptance:
    """Rounds of one method over a set of responses. Additive; `Acceptance()` is the empty set.

    `histogram[a]` counts the rounds that accepted a tokens. `measured[k-1]` counts the rounds in which slots 1..k-1
    were accepted and slot k lies within the response; a slot beyond the end is not measured, which is not rejected.
    """

    responses: int = 0
    tokens: int = 0
    responses_with_rounds: int = 0
    sum_of_response_lengths: float = 0.0
    histogram: tuple[int, ...] = ()
    measured: tuple[int, ...] = ()

    @classmethod
    def of_response(cls, accepted: Sequence[int], *, num_tokens: int, num_slots: int) -> "Acceptance":
        """From the accepted count of each round of one response of `num_tokens`; blocks have `num_slots` slots."""
        histogram, tried = [0] * (num_slots + 1), [0] * (num_slots + 1)
        for count, anchor in zip(accepted, anchors(accepted, num_tokens=num_tokens), strict=True):
            histogram[count] += 1
            tried[min(count + 1, num_slots, num_tokens - 1 - anchor)] += 1
        return cls(
            responses=1,
            tokens=num_tokens,
            responses_with_rounds=int(bool(accepted)),
            sum_of_response_lengths=1 + sum(accepted) / len(accepted) if accepted else 0.0,
            histogram=tuple(histogram),
            measured=tuple(sum(tried[slot:]) for slot in range(1, num_slots + 1)),
        )

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(
            responses=self.responses + other.responses,
            tokens=self.tokens + other.tokens,
            responses_with_rounds=self.responses_with_rounds + other.responses_with_rounds,
            sum_of_response_lengths=self.sum_of_response_lengths + other.sum_of_response_lengths,
            histogram=tuple(a + b for a, b in zip_longest(self.histogram, other.histogram, fillvalue=0)),
            measured=tuple(a + b for a, b in zip_longest(self.measured, other.measured, fillvalue=0)),
        )

    @property
    def rounds(self) -> int:
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        return sum(count * rounds for count, rounds in enumerate(self.histogram))

    @property
    def acceptance_length(self) -> float | None:
        """tau over all rounds; None where there was none."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def per_response_mean(self) -> float | None:
        """The mean of each response's own tau, as papers print it; None where no response had a round."""
        return self.sum_of_response_lengths / self.responses_with_rounds if self.responses_with_rounds else None

    @property
    def slot_accepted(self) -> tuple[int, ...]:
        """Rounds that accepted slot k (at k-1)."""
        return tuple(sum(self.histogram[k:]) for k in range(1, len(self.histogram)))

    @property
    def conditional_acceptance(self) -> tuple[float | None, ...]:
        """P(slot k accepted | slots before it accepted), at k-1; None where the slot was never measured."""
        return tuple(a / m if m else None for a, m in zip(self.slot_accepted, self.measured, strict=True))


class Expected(NamedTuple):
    """Of a response, in the mean over the random numbers that gave this response."""

    rounds: float
    accepted: float
