"""Worst cases: the responses, and in them the places, where drafts die earliest. Knows no tokenizer."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from dflash.decoding.acceptance import anchors
from dflash.decoding.responses import Response

NUM_CASES = 5
ROUNDS = 8  # in a row, that make a place
TOKENS_BEFORE = 24  # shown before the place


def worst_cases(
    responses: Sequence[Response],
    *,
    method: str,
    num_slots: int,
    prompt: Callable[[Response], str],
    text: Callable[[Response, int, int], str],
    num_cases: int = NUM_CASES,
) -> list[dict[str, Any]]:
    """The responses of the lowest acceptance length, each with the run of rounds in it that accepted least.

    Responses of fewer rounds than such a run say little: they are left out unless all are so short. `prompt` gives a
    response's prompt as text, `text` its tokens [start, end), counted from its first. `missed` are the tokens that the
    drafter did not foresee, one per round; none where all of its slots were accepted.
    """
    longest = max((len(response.accepted[method]) for response in responses), default=0)
    known = [r for r in responses if len(r.accepted[method]) >= max(1, min(ROUNDS, longest))]
    known.sort(key=lambda r: (sum(r.accepted[method]) / len(r.accepted[method]), r.key))
    cases = []
    for response in known[:num_cases]:
        accepted = response.accepted[method]
        starts = anchors(accepted, num_tokens=response.num_tokens)
        length = min(ROUNDS, len(accepted))
        sums = [0, *accumulate(accepted)]
        first = min(range(len(accepted) - length + 1), key=lambda i: sums[i + length] - sums[i])
        start, end = starts[first] + 1, [*starts, response.num_tokens - 1][first + length] + 1
        missed = [starts[i] + accepted[i] + 1 for i in range(first, first + length) if accepted[i] < num_slots]
        cases.append(
            {
                "id": response.id,
                "set": response.set,
                "category": response.category,
                "method": method,
                "acceptance_length": 1 + sum(accepted) / len(accepted),
                "rounds": len(accepted),
                "start": start,
                "end": end,
                "rounds_there": length,
                "accepted_there": sums[first + length] - sums[first],
                "prompt": prompt(response),
                "before": text(response, max(0, start - TOKENS_BEFORE), start),
                "text": text(response, start, end),
                "missed": [text(response, at, at + 1) for at in missed if at < response.num_tokens],
            }
        )
    return cases
