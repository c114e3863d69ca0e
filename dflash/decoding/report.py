"""The report of an evaluation: responses to the JSON record that docs/report.md describes. Knows no model and no file.

Numbers are kept as they are; without data they are null, which is "not measured" and not 0.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.decoding.acceptance import Acceptance, anchors
from dflash.decoding.adviser import PLAIN, Costs, advise
from dflash.decoding.responses import RECALL_AT, Response
from dflash.decoding.statistics import tau_intervals

SCHEMA_VERSION = 3
"""Of report.json: raised by one when a field is added, removed or renamed, and when what a number means changes."""


def assemble(
    responses: Sequence[Response],
    *,
    drafter: str,
    verifier: Mapping[str, str],
    hidden_states: Mapping[str, str],
    conditions: Mapping[str, Any],
    num_slots: int,
    seed: int,
    live: Mapping[str, Any],
    costs: Costs | None = None,
    worst: Sequence[Mapping[str, Any]] = (),
    trained: Mapping[str, Any] | None = None,
    evaluated: Mapping[str, Any] | None = None,
    parity: Mapping[str, Any] | None = None,
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """The record of report.json.

    `verifier` has name, identity and dtype; `hidden_states` the key of each set's; `conditions` what else must be equal
    for numbers to be comparable, such as the template and the thinking mode; `live` the section of that name, with
    `timing` where decoding was timed. `trained` and `evaluated` say under which conditions, `parity` what the gate
    found; `warnings` come before the notes. Every response has the same methods.
    Raises ValueError where there is no response.
    """
    if not responses:
        raise ValueError("evaluation: no response to report on; give prompts that the verifier answers")
    responses = sorted(responses, key=lambda response: response.key)  # intervals do not depend on the order
    methods = list(responses[0].accepted)
    assert all(list(response.accepted) == methods for response in responses), "a method is missing in a response"
    sets: dict[str, list[Response]] = defaultdict(list)
    categories: dict[str, dict[str, list[Response]]] = defaultdict(lambda: defaultdict(list))
    for response in responses:
        sets[response.set].append(response)
        categories[response.set][response.category].append(response)

    def numbers(group: Sequence[Response]) -> dict[str, Any]:
        return _numbers(group, methods=methods, num_slots=num_slots, seed=seed)

    overall = numbers(responses)
    return {
        "schema_version": SCHEMA_VERSION,
        "drafter": drafter,
        "verifier": dict(verifier),
        "hidden_states": dict(hidden_states),
        "conditions": dict(conditions),
        "num_slots": num_slots,
        "methods": methods,
        "acceptance_length": overall["acceptance_length"],
        "notes": [*warnings, *_notes(overall, greedy=not conditions.get("temperature"))],
        "trained": dict(trained) if trained else None,
        "evaluated": dict(evaluated) if evaluated else None,
        "parity": dict(parity) if parity else None,
        "overall": overall,
        "sets": {
            name: numbers(group) | {"categories": {c: numbers(part) for c, part in sorted(categories[name].items())}}
            for name, group in sorted(sets.items())
        },
        "adviser": advise(responses, num_slots=num_slots, costs=costs) if costs else None,
        "worst": [dict(case) for case in worst],
        "live": {**live, "speedup": _measured_speedup(live)},
    }


def _measured_speedup(live: Mapping[str, Any]) -> dict[str, float] | None:
    """Seconds per token of plain decoding over those of each method; None where decoding was not timed.

    The first token of each response is none of decoding: the prompt's pass gives it, which is not timed.
    """
    timing = live.get("timing", {})
    if PLAIN not in timing:
        return None
    per_token = {m: sum(part["seconds"].values()) / (part["tokens"] - live["prompts"]) for m, part in timing.items()}
    return {method: per_token[PLAIN] / seconds for method, seconds in per_token.items() if method != PLAIN}


def _numbers(group: Sequence[Response], *, methods: Sequence[str], num_slots: int, seed: int) -> dict[str, Any]:
    totals = {
        method: sum((response.acceptance(method, num_slots=num_slots) for response in group), Acceptance())
        for method in methods
    }
    intervals = tau_intervals(
        [[sum(response.accepted[method]) for method in methods] for response in group],
        [[len(response.accepted[method]) for method in methods] for response in group],
        conversations_R=[response.conversation for response in group],
        seed=seed,
    )
    tokens = sum(response.num_tokens for response in group)
    truncated = sum(response.truncated for response in group)
    asked = [response for response in group if response.num_on_policy is not None]
    return {
        "responses": len(group),
        "conversations": len({response.conversation for response in group}),
        "tokens": tokens,
        "truncated": truncated,
        "truncated_share": truncated / len(group),
        "on_policy_share": sum(r.num_on_policy or 0 for r in asked) / tokens if len(asked) == len(group) else None,
        "rounds": {method: total.rounds for method, total in totals.items()},
        "accepted": {method: total.accepted for method, total in totals.items()},
        "acceptance_length": {method: total.acceptance_length for method, total in totals.items()},
        "interval": {method: list(intervals[i]) if intervals else None for i, method in enumerate(methods)},
        "per_response_mean": {method: total.per_response_mean for method, total in totals.items()},
        "histogram": {method: list(total.histogram) for method, total in totals.items()},
        "conditional_acceptance": {method: _by_slot(total) for method, total in totals.items()},
        "recall": _recall(group),
        "calibration": {method: _calibration(group, method, num_slots=num_slots) for method in methods},
        "rejection": _rejection(group, seed=seed),
    }


def _rejection(group: Sequence[Response], *, seed: int) -> dict[str, Any] | None:
    expected = [response.rejection for response in group if response.rejection]
    if len(expected) < len(group):
        return None
    accepted, rounds = [[one.accepted] for one in expected], [[one.rounds] for one in expected]
    conversations = [response.conversation for response in group]
    intervals = tau_intervals(accepted, rounds, conversations_R=conversations, seed=seed)
    totals = sum(one.rounds for one in expected), sum(one.accepted for one in expected)
    return {
        "rounds": totals[0],
        "accepted": totals[1],
        "acceptance_length": 1 + totals[1] / totals[0] if totals[0] else None,
        "interval": list(intervals[0]) if intervals else None,
    }


def _by_slot(total: Acceptance) -> list[dict[str, Any]]:
    parts = zip(total.slot_accepted, total.measured, total.conditional_acceptance, strict=True)
    return [
        {"slot": slot, "accepted": accepted, "measured": measured, "share": share}
        for slot, (accepted, measured, share) in enumerate(parts, start=1)
    ]


def _recall(group: Sequence[Response]) -> dict[str, Any] | None:
    slots = sum(response.recall_slots for response in group)
    if not slots:
        return None
    hits = [sum(counts) for counts in zip(*(r.recall_hits for r in group if r.recall_slots), strict=True)]
    return {
        "slots": slots,
        "at": [{"k": k, "hits": count, "share": count / slots} for k, count in zip(RECALL_AT, hits, strict=True)],
    }


def _calibration(group: Sequence[Response], method: str, *, num_slots: int) -> dict[str, Any] | None:
    """Expected and realised accepted tokens, over the rounds whose slots all lie within the response.

    The drafter does not know where a response ends: in later rounds it expects what could not be accepted.
    """
    expected: list[float] = []
    realised: list[int] = []
    for response in group:
        if method in response.expected:
            accepted = response.accepted[method]
            within = bisect_left(anchors(accepted, num_tokens=response.num_tokens), response.num_tokens - num_slots)
            expected += response.expected[method][:within]
            realised += accepted[:within]
    if not expected:
        return None
    pairs_N2 = np.array([expected, realised]).T
    bins_N = pairs_N2[:, 0].astype(int)

    def means(some_N2: NDArray[np.float64]) -> dict[str, Any]:
        first, second = some_N2.mean(axis=0).tolist()
        return {"rounds": len(some_N2), "expected": first, "realised": second}

    bins = [{"from": int(at)} | means(pairs_N2[bins_N == at]) for at in np.unique(bins_N)]
    return means(pairs_N2) | {"bins": bins}


def _notes(overall: Mapping[str, Any], *, greedy: bool) -> list[str]:
    """What a reader must know before believing the numbers."""
    notes = []
    if overall["conversations"] == 1:
        notes.append("One conversation: there is no interval, and no verdict can be based on it.")
    if overall["truncated"] == overall["responses"]:
        notes.append("Every response was cut at the length limit: how drafts fare near an end is not measured.")
    elif overall["truncated_share"] > 0.5:
        notes.append(f"{overall['truncated_share']:.0%} of the responses were cut at the length limit.")
    if greedy and overall["on_policy_share"] is not None and overall["on_policy_share"] < 1:
        notes.append(
            f"{overall['on_policy_share']:.2%} of the tokens are the verifier's own greedy choice: of the others, "
            "replay measures a text that it would not write."
        )
    if not any(overall["rounds"].values()):
        notes.append("No response has more than one token: there was no round.")
    return notes
