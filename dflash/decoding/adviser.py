"""Which budget pays: acceptance and costs to the expected speedup over plain decoding. Knows no model and no clock.

    speedup = tokens * plain / (rounds * (draft + verify(nodes)))

`tokens` are all but each response's first (the prefill gives it), `plain` is the verifier's pass over one token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dflash.decoding.acceptance import num_nodes, walk_rounds
from dflash.decoding.responses import Response

PLAIN = "plain"


@dataclass(frozen=True)
class Costs:
    """What a round costs in seconds: one draft, and one verification, its tree, walk and commit included.

    `verify` holds (nodes, seconds) points: the verifier's pass over the anchor and so many drafted tokens. The first
    point is plain decoding, of 0 nodes. Between points costs are interpolated; beyond the last one they are unknown.
    """

    draft_seconds: float
    verify: tuple[tuple[int, float], ...]
    source: Literal["measured", "given"]

    def __post_init__(self) -> None:
        nodes = [nodes for nodes, _ in self.verify]
        if not nodes or nodes[0] != 0 or nodes != sorted(set(nodes)):
            raise ValueError(
                f"costs.verify: nodes {nodes} must ascend from 0; 0 nodes is plain decoding, measure it too"
            )
        if self.draft_seconds < 0 or not all(seconds > 0 for _, seconds in self.verify):
            raise ValueError(
                f"costs: {self.draft_seconds} and {self.verify} must be positive seconds; measure them again"
            )

    @property
    def plain_seconds(self) -> float:
        return self.verify[0][1]

    def round_seconds(self, nodes: int) -> float | None:
        """One draft and its verification; None where verification was not measured for so many nodes."""
        known, seconds = zip(*self.verify, strict=True)
        return None if nodes > known[-1] else self.draft_seconds + float(np.interp(nodes, known, seconds))


def _row(*, nodes: int, accepted: int, rounds: int, tokens: int, costs: Costs) -> dict[str, Any]:
    seconds = costs.round_seconds(nodes)
    return {
        "nodes": nodes,
        "acceptance_length": 1 + accepted / rounds if rounds else None,
        "seconds_per_round": seconds,
        "speedup": tokens * costs.plain_seconds / (rounds * seconds) if rounds and seconds else None,
    }


def _best(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The name and speedup of the fastest row, the first of equals; None where no speedup is known."""
    known = [row for row in rows if row["speedup"] is not None]
    if not known:
        return None
    best = max(known, key=lambda row: row["speedup"])
    return {name: best[name], "speedup": best["speedup"]}


def advise(responses: Sequence[Response], *, num_slots: int, costs: Costs) -> dict[str, Any]:
    """The expected speedup over plain decoding by method, and for the chain by how many slots of the block are used.

    A chain of s slots accepts what the whole one accepts, at most s, so its rounds follow exactly from `chain_at`; the
    drafter still drafts its whole block. A smaller block would be another drafter: its slots see each other. `slots` is
    empty where `chain_at` is missing. `best` is plain decoding where nothing is faster.
    """
    tokens = sum(response.num_tokens - 1 for response in responses)
    methods = []
    for method in responses[0].accepted:
        rounds = [response.accepted[method] for response in responses]
        counts = {"accepted": sum(map(sum, rounds)), "rounds": sum(map(len, rounds))}
        nodes = num_nodes(method, num_slots=num_slots)
        methods.append({"method": method} | _row(nodes=nodes, **counts, tokens=tokens, costs=costs))
    slots = []
    if all(len(response.chain_at) == response.num_tokens - 1 for response in responses):
        for used in range(1, num_slots + 1):
            rounds = [
                tuple(walk_rounds([min(count, used) for count in response.chain_at], num_tokens=response.num_tokens))
                for response in responses
            ]
            counts = {"accepted": sum(map(sum, rounds)), "rounds": sum(map(len, rounds))}
            slots.append({"slots": used} | _row(nodes=used, **counts, tokens=tokens, costs=costs))
    plain = {"method": PLAIN, "speedup": 1.0}
    return {
        "source": costs.source,
        "draft_seconds": costs.draft_seconds,
        "verify": [list(point) for point in costs.verify],
        "methods": methods,
        "best": _best([plain, *methods], "method"),
        "slots": slots,
        "best_slots": _best(slots, "slots"),
    }
