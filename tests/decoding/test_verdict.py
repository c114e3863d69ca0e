"""The verdict: on the same responses and under the same conditions only, and symmetric."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from evaluated_small import CONDITIONS, VERIFIER, response, small_report, some_responses

from dflash.decoding.acceptance import CHAIN
from dflash.decoding.report import SCHEMA_VERSION
from dflash.decoding.responses import RESPONSES, Response, write_responses
from dflash.decoding.verdict import Comparison, Evaluated, compare, load_evaluated

GOOD = some_responses(30, skill=0.7, seed=1)
POOR = some_responses(30, skill=0.5, seed=2)


def evaluated(responses: list[Response], **changes: Any) -> Evaluated:
    return Evaluated(small_report(responses, **changes), responses)


def verdict(
    candidate: Evaluated,
    champion: Evaluated,
    *,
    method: str = CHAIN,
    minimum_difference: float = 0.05,
    minimum_conversations: int = 8,
) -> Comparison:
    return compare(
        candidate,
        champion,
        method=method,
        minimum_difference=minimum_difference,
        minimum_conversations=minimum_conversations,
        seed=0,
    )


def test_a_better_drafter_is_better_and_the_other_way_round_it_is_worse() -> None:
    one, other = verdict(evaluated(GOOD), evaluated(POOR)), verdict(evaluated(POOR), evaluated(GOOD))
    assert (one.verdict, other.verdict) == ("better", "worse")
    assert one.overall
    assert other.overall
    assert one.overall.interval
    assert other.overall.interval
    assert one.overall.difference == pytest.approx(-(other.overall.difference or 0))
    assert one.overall.interval == pytest.approx((-other.overall.interval[1], -other.overall.interval[0]))
    assert {name: part.verdict for name, part in one.categories.items()} == {"maths": "better", "writing": "better"}
    assert sum(part.responses for part in one.categories.values()) == one.overall.responses == 30
    assert verdict(evaluated(GOOD[::-1]), evaluated(POOR)) == one, "the order of the responses does not matter"


def test_a_drafter_is_the_same_as_itself() -> None:
    found = verdict(evaluated(GOOD), evaluated(GOOD), minimum_difference=0)
    assert found.verdict == "same"
    assert "the interval holds 0" in found.reason


def test_a_real_but_small_difference_is_the_same() -> None:
    found = verdict(evaluated(GOOD), evaluated(POOR), minimum_difference=50)
    assert found.verdict == "same"
    assert "less than the minimum difference 50" in found.reason


def test_the_verdict_is_of_the_method_that_was_asked_for() -> None:
    mixed = [
        dataclasses.replace(good, accepted={CHAIN: poor.accepted[CHAIN], "tree8": good.accepted["tree8"]}, expected={})
        for good, poor in zip(GOOD, POOR, strict=True)
    ]
    assert verdict(evaluated(mixed), evaluated(POOR), method="tree8").verdict == "better"
    assert verdict(evaluated(mixed), evaluated(POOR), method=CHAIN).verdict == "same"
    missing = verdict(evaluated(mixed), evaluated(POOR), method="tree64")
    assert missing.verdict == "not comparable"
    assert missing.reason == "the candidate was not evaluated with tree64, only with chain, tree8"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"verifier": VERIFIER | {"identity": "another"}}, "verifier another and 0123456789abcdef"),
        ({"verifier": VERIFIER | {"dtype": "bfloat16"}}, "dtype bfloat16 and float32"),
        ({"conditions": CONDITIONS | {"template": "t2"}}, "template t2 and t1"),
        ({"conditions": CONDITIONS | {"thinking": "on"}}, "thinking on and default"),
        ({"conditions": CONDITIONS | {"max_new_tokens": 8}}, "max_new_tokens 8 and None"),
    ],
)
def test_other_conditions_are_not_comparable(changes: dict[str, Any], reason: str) -> None:
    found = verdict(evaluated(GOOD, **changes), evaluated(POOR))
    assert found.verdict == "not comparable"
    assert found.reason.startswith(reason)
    assert found.overall is None


def test_other_definitions_are_not_comparable() -> None:
    old = Evaluated(small_report(POOR) | {"schema_version": 1}, POOR)
    assert f"definitions {SCHEMA_VERSION} and 1" in verdict(evaluated(GOOD), old).reason
    unversioned = Evaluated({"drafter": "training-0"}, POOR)
    assert verdict(evaluated(GOOD), unversioned).verdict == "not comparable"


def test_other_responses_are_not_comparable() -> None:
    fewer = verdict(evaluated(GOOD[1:]), evaluated(POOR[:-2]))
    assert fewer.verdict == "not comparable"
    assert "2 only in the candidate, 1 only in the champion, 0 of other content" in fewer.reason
    changed = [dataclasses.replace(GOOD[0], content="of another text"), *GOOD[1:]]
    found = verdict(evaluated(changed), evaluated(POOR))
    assert found.verdict == "not comparable"
    assert "0 only in the candidate, 0 only in the champion, 1 of other content" in found.reason
    assert verdict(evaluated([*GOOD, GOOD[0]]), evaluated(POOR)).verdict == "not comparable"


def test_few_conversations_have_no_verdict() -> None:
    for count in (1, 7):
        found = verdict(evaluated(GOOD[:count]), evaluated(POOR[:count]))
        assert found.verdict == "not comparable"
        assert found.reason.endswith(f": {count} conversations, of 8 that it takes; evaluate more")
        assert found.overall
        assert (found.overall.interval is None) == (count == 1)
    assert verdict(evaluated(GOOD[:8]), evaluated(POOR[:8])).verdict == "better"
    assert verdict(evaluated(GOOD[:7]), evaluated(POOR[:7]), minimum_conversations=7).verdict == "better"
    empty = [response("p", num_tokens=1)]
    assert verdict(evaluated(empty), evaluated(empty)).reason == "no response has a round"


def test_the_turns_of_a_conversation_are_not_counted_as_conversations() -> None:
    def turns(responses: list[Response]) -> list[Response]:
        return [dataclasses.replace(one, id=f"c{number // 6}#{number % 6}") for number, one in enumerate(responses)]

    found = verdict(evaluated(turns(GOOD)), evaluated(turns(POOR)))
    assert found.overall
    assert (found.verdict, found.overall.responses, found.overall.conversations) == ("not comparable", 30, 5)


def test_minima_that_make_no_sense_are_refused() -> None:
    for minimum in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="minimum_difference"):
            verdict(evaluated(GOOD), evaluated(POOR), minimum_difference=minimum)
    with pytest.raises(ValueError, match="minimum_conversations 1 must be 2 or more"):
        verdict(evaluated(GOOD), evaluated(POOR), minimum_conversations=1)


def test_evaluations_are_compared_from_their_folders(tmp_path: Path) -> None:
    for name, responses in (("good", GOOD), ("poor", POOR)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(small_report(responses)))
        write_responses(tmp_path / name, responses)
    good, poor = (load_evaluated(tmp_path / name) for name in ("good", "poor"))
    assert verdict(good, poor) == verdict(evaluated(GOOD), evaluated(POOR))
    other = {"schema_version": SCHEMA_VERSION - 1, "drafter": "training-9", "methods": ["chain"]}
    (tmp_path / "poor" / "report.json").write_text(json.dumps(other))  # whatever its responses look like
    (tmp_path / "poor" / RESPONSES).unlink()
    assert verdict(good, load_evaluated(tmp_path / "poor")).verdict == "not comparable"
    lacking = {name: value for name, value in good.report.items() if name != "conditions"}
    of_no_method = {**good.report, "methods": 5}
    for damage in ("{", "[]", "{}", "\x00", json.dumps(lacking), json.dumps(of_no_method)):
        (tmp_path / "good" / "report.json").write_text(damage)
        with pytest.raises(ValueError, match=r"good/report\.json: no report") as error:
            load_evaluated(tmp_path / "good")
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"absent/report\.json: unreadable"):
        load_evaluated(tmp_path / "absent")
