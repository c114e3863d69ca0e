"""Evaluations without a model: responses whose rounds are drawn from a seed, and their report."""

import math
import random
from collections.abc import Sequence
from typing import Any

from dflash.decoding.acceptance import CHAIN, Expected, method_name, walk_rounds
from dflash.decoding.adviser import Costs
from dflash.decoding.report import assemble
from dflash.decoding.responses import RECALL_AT, Response, content_hash
from dflash.decoding.worst import worst_cases

NUM_SLOTS = 7
BUDGETS = (8, 64, 512)
VERIFIER = {"name": "tiny", "identity": "0123456789abcdef", "dtype": "float32"}
LIVE = {"prompts": 0, "text_equal": None, "near_ties": None, "rounds_equal": None, "runs": []}
CONDITIONS = {"template": "t1", "thinking": "default", "temperature": 0.0}
ANSWERED = {"dtype": "float32", "template": "t1", "thinking": "default", "max_new_tokens": 128}
COSTS = Costs(draft_seconds=0.002, verify=((0, 0.02), (64, 0.022), (256, 0.04)), source="given")


def recall_hits(ranks: Sequence[int]) -> tuple[int, ...]:
    """How many of the ranks (0: the drafter's best token) are below each K of RECALL_AT."""
    return tuple(sum(rank < k for rank in ranks) for k in RECALL_AT)


def response(
    name: str,
    *,
    skill: float = 0.6,
    category: str = "maths",
    set_name: str = "bundled",
    num_tokens: int = 60,
    budgets: Sequence[int] = BUDGETS,
    seed: int = 0,
    drawn: bool = False,
) -> Response:
    """A response in which each slot is right with a probability that grows with the budget and has its own difficulty.

    The text, and so the content, depends on the name alone.
    """
    generator = random.Random(f"{name} {seed}")
    difficulty = random.Random(name).uniform(0.8, 1.1)

    def accepted_at(budget: int) -> list[int]:
        p = min(0.95, skill * difficulty + 0.04 * math.log2(budget))
        longest = [
            next((slot for slot in range(NUM_SLOTS) if generator.random() > p), NUM_SLOTS)
            for _ in range(num_tokens - 1)
        ]
        return [min(count, num_tokens - 1 - at) for at, count in enumerate(longest)]

    at = {CHAIN: accepted_at(1)} | {method_name(budget): accepted_at(budget) for budget in budgets}
    accepted = {method: tuple(walk_rounds(counts, num_tokens=num_tokens)) for method, counts in at.items()}
    ranks = [int(generator.expovariate(0.4)) for _ in range(num_tokens)]
    return Response(
        id=name,
        set=set_name,
        category=category,
        content=content_hash([1, 2, 3], list(name.encode())),
        num_tokens=num_tokens,
        truncated=generator.random() < 0.2,
        accepted=accepted,
        expected={m: tuple(generator.uniform(0, NUM_SLOTS / 2) for _ in rounds) for m, rounds in accepted.items()},
        chain_at=tuple(at[CHAIN]),
        recall_hits=recall_hits(ranks),
        recall_slots=len(ranks),
        num_on_policy=num_tokens,
        rejection=Expected(sum(map(len, accepted.values())) / 3, 1.5) if drawn else None,
    )


def some_responses(count: int = 12, *, skill: float = 0.6, seed: int = 0) -> list[Response]:
    """Of two categories in turn."""
    return [
        response(f"p{number}", skill=skill, category=("maths", "writing")[number % 2], seed=seed)
        for number in range(count)
    ]


def text(response: Response, start: int, end: int) -> str:
    return "".join(f"{response.id}[{at}] " for at in range(start, end))


def small_report(responses: Sequence[Response], **changes: Any) -> dict[str, Any]:
    """The report of some responses, with every section that needs no model."""
    given: dict[str, Any] = {
        "drafter": "training-1",
        "verifier": VERIFIER,
        "hidden_states": {"bundled": "extraction-1"},
        "conditions": CONDITIONS,
        "num_slots": NUM_SLOTS,
        "seed": 0,
        "live": LIVE,
    }
    return assemble(responses, **given | changes)


def timing(*, passes: int, verify: float) -> dict[str, Any]:
    """A second for drafts, trees and commits together, but in plain decoding."""
    rest = 0.0 if passes == 59 else 0.5
    return {
        "tokens": 60,
        "passes": passes,
        "seconds": {"draft": rest, "tree": rest / 2, "verify": verify, "commit": rest / 2},
    }


def full_report(responses: Sequence[Response]) -> dict[str, Any]:
    run = {"id": "p1", "category": "maths", "method": "tree64", "tokens": 60, "rounds": 20, "accepted": 39}
    return small_report(
        responses,
        costs=COSTS,
        worst=worst_cases(
            responses, method=CHAIN, num_slots=NUM_SLOTS, prompt=lambda r: f"Prompt of {r.id} <b>&", text=text
        ),
        trained={"rows": 100, "overlap": 1, "conditions": ANSWERED},
        evaluated=ANSWERED,
        parity={"agreement": 1.0, "compared": 900, "rounds": 80, "near_ties": 1, "defect": "", "explanation": ""},
        warnings=["1 of 12 prompts are in the training data."],
        live={
            "prompts": 1,
            "text_equal": True,
            "near_ties": 0,
            "rounds_equal": False,
            "runs": [run | {"text_equal": True, "near_tie": False, "rounds_equal": False}],
            "timing": {
                "plain": timing(passes=59, verify=10.0),
                "chain": timing(passes=30, verify=6.0),
                "tree64": timing(passes=20, verify=4.0),
            },
        },
    )
