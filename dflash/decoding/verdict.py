"""Is a drafter better than another? Two reports on the same responses in, a verdict with its reason out.

    better   the interval of the difference lies above 0, and the difference is at least the minimum
    worse    the same with the roles exchanged
    same     neither: the reason says whether the difference is too small or too uncertain
    not comparable   other verifiers, conditions, definitions or responses, or too few conversations to go by

Knows no model, and not who the champion is.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError

from dflash.decoding.report import SCHEMA_VERSION
from dflash.decoding.responses import Response, read_responses
from dflash.decoding.statistics import Interval, Paired, paired_difference
from dflash.decoding.tables import category_name

Verdict = Literal["better", "same", "worse", "not comparable"]


class Evaluated(NamedTuple):
    """A report and the responses that it is about."""

    report: Mapping[str, Any]
    responses: Sequence[Response]


class _Named(BaseModel):
    """What every report has said of itself, in all versions."""

    schema_version: int
    drafter: str
    methods: list[str]


class _Verifier(BaseModel):
    identity: str
    dtype: str


class _Compared(_Named):
    """What a comparison takes of a report."""

    verifier: _Verifier
    conditions: dict[str, Any]
    sets: dict[str, Any]


def load_evaluated(folder: Path) -> Evaluated:
    """From the folder of an evaluation; one of another version, which is compared with nothing, without its responses.

    Raises ValueError naming the file where one is missing or unreadable.
    """
    path = folder / "report.json"
    try:
        text = path.read_bytes()
        if _Named.model_validate_json(text).schema_version != SCHEMA_VERSION:
            return Evaluated(json.loads(text), [])
        _Compared.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise ValueError(f"{path}: no report ({what}); run the evaluation stage again") from None
    except OSError as error:
        raise ValueError(f"{path}: unreadable ({error}); run the evaluation stage again") from None
    return Evaluated(json.loads(text), read_responses(folder))


@dataclass(frozen=True)
class Difference:
    """Candidate against champion on some responses; `interval` is of the difference of their acceptance lengths."""

    verdict: Verdict
    reason: str
    responses: int
    conversations: int = 0
    candidate: float | None = None
    champion: float | None = None
    difference: float | None = None
    interval: Interval | None = None


@dataclass(frozen=True)
class Comparison:
    """The verdict over all responses, what it rests on, and each category's own. Categories do not decide."""

    verdict: Verdict
    reason: str
    method: str
    minimum_difference: float
    candidate: str
    champion: str
    overall: Difference | None = None
    categories: Mapping[str, Difference] = field(default_factory=dict)


def _obstacle(candidate: Evaluated, champion: Evaluated, *, method: str) -> str | None:
    """Why two evaluations cannot be compared, if so, and what to do about it."""
    ours, theirs = candidate.report, champion.report
    versions = [report.get("schema_version") for report in (ours, theirs)]
    if versions != [SCHEMA_VERSION] * 2:
        return f"definitions {versions[0]} and {versions[1]}, this version has {SCHEMA_VERSION}; evaluate both again"
    facts = [("verifier", ours["verifier"]["identity"], theirs["verifier"]["identity"])]
    facts += [("dtype", ours["verifier"]["dtype"], theirs["verifier"]["dtype"])]
    facts += [
        (name, ours["conditions"].get(name), theirs["conditions"].get(name))
        for name in sorted({*ours["conditions"], *theirs["conditions"]})
    ]
    for name, one, other in facts:
        if one != other:
            return f"{name} {one} and {other}; evaluate both with the same"
    for whose, report in (("candidate", ours), ("champion", theirs)):
        if method not in report["methods"]:
            return f"the {whose} was not evaluated with {method}, only with {', '.join(report['methods'])}"
    mine, others = ({response.key for response in one.responses} for one in (candidate, champion))
    if mine != others or len(candidate.responses) != len(champion.responses):
        ids = [{key[:2] for key in keys} for keys in (mine, others)]
        changed = len({key[:2] for key in mine ^ others} & ids[0] & ids[1])
        return (
            f"the responses differ: {len(ids[0] - ids[1])} only in the candidate, {len(ids[1] - ids[0])} only in the "
            f"champion, {changed} of other content; evaluate both on the same set"
        )
    return None


def _judge(
    pairs: Sequence[tuple[Response, Response]],
    *,
    method: str,
    minimum_difference: float,
    minimum_conversations: int,
    seed: int,
) -> Difference:
    sums = [[(sum(r.accepted[method]), len(r.accepted[method])) for r in side] for side in zip(*pairs, strict=True)]
    paired = paired_difference(*sums, conversations_R=[one.conversation for one, _ in pairs], seed=seed)
    if paired is None:
        return Difference("not comparable", "no response has a round", responses=len(pairs))
    verdict, reason = _verdict(
        paired, minimum_difference=minimum_difference, minimum_conversations=minimum_conversations
    )
    return Difference(
        verdict,
        reason,
        responses=len(pairs),
        conversations=paired.conversations,
        candidate=paired.first,
        champion=paired.second,
        difference=paired.difference,
        interval=paired.interval,
    )


def _verdict(paired: Paired, *, minimum_difference: float, minimum_conversations: int) -> tuple[Verdict, str]:
    facts = f"{paired.first:.3f} against {paired.second:.3f}, {paired.difference:+.3f}"
    if paired.interval:
        facts += f" ({paired.interval[0]:+.3f} to {paired.interval[1]:+.3f})"
    if paired.interval is None or paired.conversations < minimum_conversations:
        few = max(2, minimum_conversations)
        return "not comparable", f"{facts}: {paired.conversations} conversations, of {few} that it takes; evaluate more"
    if paired.interval[0] <= 0 <= paired.interval[1]:
        return "same", f"{facts}: the interval holds 0"
    if abs(paired.difference) < minimum_difference:
        return "same", f"{facts}: less than the minimum difference {minimum_difference:g}"
    return ("better" if paired.difference > 0 else "worse"), facts


def compare(
    candidate: Evaluated,
    champion: Evaluated,
    *,
    method: str,
    minimum_difference: float,
    minimum_conversations: int,
    seed: int,
) -> Comparison:
    """Compare the acceptance length of one method on the same responses, by a paired bootstrap over conversations.

    The verdict is that of all responses; it is symmetric: exchanging the two exchanges better and worse.
    """
    if not minimum_difference >= 0:
        raise ValueError(f"minimum_difference {minimum_difference} must be 0 or more")
    if minimum_conversations < 2:
        raise ValueError(f"minimum_conversations {minimum_conversations} must be 2 or more: one has no interval")
    names = {"candidate": candidate.report["drafter"], "champion": champion.report["drafter"]}
    if obstacle := _obstacle(candidate, champion, method=method):
        return Comparison("not comparable", obstacle, method, minimum_difference, **names)
    pairs = list(zip(*(sorted(one.responses, key=lambda r: r.key) for one in (candidate, champion)), strict=True))
    by_category: dict[str, list[tuple[Response, Response]]] = {}
    for pair in pairs:
        name = category_name(candidate.report, pair[0].set, pair[0].category)
        by_category.setdefault(name, []).append(pair)

    def judge(some: Sequence[tuple[Response, Response]]) -> Difference:
        return _judge(
            some,
            method=method,
            minimum_difference=minimum_difference,
            minimum_conversations=minimum_conversations,
            seed=seed,
        )

    overall = judge(pairs)
    return Comparison(
        overall.verdict,
        overall.reason,
        method,
        minimum_difference,
        **names,
        overall=overall,
        categories={name: judge(some) for name, some in sorted(by_category.items())},
    )
